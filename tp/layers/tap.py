"""Taps: what sees, and may replace, the values that pass the named points of a forward."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tp.layers.layout import Layout
from tp.layers.step import Step


class Site(NamedTuple):
    """A point of the residual stream: (layer index, point), or (None, point) for what belongs to no layer.

    Writes are (None, "embed"), (l, "attn_out"), (l, "mlp_out"); the states after them are (0, "resid_pre"),
    (l, "resid_mid"), (l, "resid_post"), and (l, "resid_post") is also what layer l + 1 begins with. The LM head
    reads (None, "final_norm").
    """

    layer: int | None
    point: str

    @property
    def state_after(self) -> Site:
        """Of a write: the state that it leaves."""
        if self.point == "embed":
            return Site(0, "resid_pre")
        return Site(self.layer, {"attn_out": "resid_mid", "mlp_out": "resid_post"}[self.point])


class Tap:
    """Lets everything pass unseen; subclasses override what they are interested in. Set on all ranks or on none.

    What a method returns goes on in place of what it was given. Activation checkpointing computes layers again in the
    backward, and the tap is asked again.
    """

    def on_step(self, step: Step) -> Tap:
        """A forward of these tokens begins; what is returned sees it through, with what of it is computed again."""
        return self

    def on_stream(self, site: Site, value: Tensor, layout: Layout) -> Tensor:
        """A complete write or state: this layout's share of [N, D]."""
        return value

    def on_heads(self, layer: int, z_NHd: Tensor, heads: range) -> Tensor:
        """What this rank's heads give to the output projection: [N, len(heads), head_dim].

        Args:
            heads: the global indices of this rank's query heads.
        """
        return z_NHd

    def wants_pattern(self, layer: int) -> bool:
        """Whether `on_pattern` is to be called; the weights are computed for it alone."""
        return False

    def on_pattern(self, layer: int, sequence: int, pattern_HTS: Tensor, heads: range) -> None:
        """Attention weights of one sequence of the step: [len(heads), its tokens here, its tokens so far], float32."""
