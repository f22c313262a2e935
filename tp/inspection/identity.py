"""Whether a run's states are its embedding plus its writes, up to the rounding of its dtype.

The identity is that of Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tp.errors import RequestError
from tp.inspection.activation_cache import ActivationCache


@dataclass(frozen=True)
class IdentityError:
    """How far x_L is from x_0 + Σ_l (a_l + m_l), over all captured tokens and channels.

    Attributes:
        error: the largest |x_L − (x_0 + Σ_l (a_l + m_l))|.
        allowed: what rounding may make of it, at that element.
        ratio: the largest error / allowed of any element.
    """

    error: float
    allowed: float
    ratio: float

    @property
    def holds(self) -> bool:
        """Whether rounding explains all of it."""
        return self.ratio <= 1


def residual_identity_error(cache: ActivationCache) -> IdentityError:
    """Checks x_L = x_0 + Σ_l (a_l + m_l) on a captured run.

    Each of the 2L adds rounds its sum s to the stream's dtype, by at most u·|fl(s)| with u half its machine epsilon. So
    x_L may be off by u · Σ |states after the adds|. The sum that it is compared with is made in float64; that of a
    float64 stream has its own, equal, rounding and is allowed twice as much.

    Args:
        cache: of "embed", and "attn_out", "mlp_out" and "resid_post" in all layers.

    Raises:
        RequestError: a post-norm model, whose states are no sums; or something was not captured.
    """
    config = cache.config
    check_stream_is_a_sum(cache, "the residual identity")
    state = cache.value("embed")
    total, magnitudes = state.double(), torch.zeros_like(state, dtype=torch.float64)
    for layer in range(config.num_layers):
        for point in ("attn_out", "mlp_out"):
            update = cache.value(point, layer)
            state = state + update  # as the stream does it
            magnitudes += state.double().abs()
            total += update.double()
    last = cache.value("resid_post", config.num_layers - 1)
    error = (last.double() - total).abs()
    allowed = magnitudes * torch.finfo(last.dtype).eps / 2 * (2 if last.dtype == torch.float64 else 1)
    ratio = (error / allowed).where(error != 0, 0)  # of what is not finite: nan, which does not hold
    if not error.numel():
        return IdentityError(0.0, 0.0, 0.0)
    at = error.argmax()
    return IdentityError(error.flatten()[at].item(), allowed.flatten()[at].item(), ratio.amax().item())


def check_stream_is_a_sum(cache: ActivationCache, what: str) -> None:
    """Raises `RequestError` for a post-norm model."""
    if cache.config.norm_placement == "post":
        raise RequestError(
            f"{what} needs states that are sums of writes, but this model is post-norm: it norms the stream itself, "
            "and no linear path leads from a write to the logits"
        )
