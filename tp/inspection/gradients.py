"""What a gradient owes to the identity path and what to the sublayer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tp.inspection.activation_cache import ActivationCache
from tp.inspection.identity import check_stream_is_a_sum


@dataclass(frozen=True)
class GradientPaths:
    """The two addends of the gradient at a sublayer's input, each [R, D].

    Attributes:
        identity: dL/d(state after the add): what comes through past the sublayer.
        sublayer: (∂F(x)/∂x)ᵀ · identity, F the sublayer with its norms: what comes through it.
    """

    identity: Tensor
    sublayer: Tensor


@dataclass(frozen=True)
class LayerGradientPaths:
    """Of a layer x → h = x + a(x) → y = h + m(h).

    Attributes:
        attention: dL/dx = dL/dh + (∂a/∂x)ᵀ dL/dh.
        mlp: dL/dh = dL/dy + (∂m/∂h)ᵀ dL/dy.
    """

    attention: GradientPaths
    mlp: GradientPaths


def identity_and_sublayer_gradients(cache: ActivationCache, layer: int) -> LayerGradientPaths:
    """Splits a layer's gradients by path; the sublayer's part is a difference of two gradients, rounded as they are.

    Args:
        cache: captured with gradients: "resid_pre", "resid_mid" and "resid_post" of the layer.

    Raises:
        RequestError: a post-norm model, whose identity path has a norm in it; or no gradient was captured.
    """
    check_stream_is_a_sum(cache, "the identity path")
    before, between, after = (cache.gradient(point, layer) for point in ("resid_pre", "resid_mid", "resid_post"))
    return LayerGradientPaths(GradientPaths(between, before - between), GradientPaths(after, between - after))
