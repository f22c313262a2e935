"""Where a forward, or its backward, first gives what is not finite: found by a second pass, after the fact.

The first pass looks at nothing but what it gathers anyway, so that looking for the culprit costs nothing until there
is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tp.layers.layout import Layout
from tp.layers.sharded_logits import ShardedLogits
from tp.layers.tap import Site, Tap
from tp.parallel.group import TensorParallelGroup

_OF_NO_LAYER = {"embed": "the embedding", "final_norm": "the final norm"}
_OF_A_LAYER = {
    "attn_out": "the attention of layer {}",
    "mlp_out": "the MLP of layer {}",
    "resid_pre": "the residual stream before layer {}",
    "resid_mid": "the residual stream after the attention of layer {}",
    "resid_post": "the residual stream after layer {}",
}
LM_HEAD = "the LM head"


class Place(NamedTuple):
    """Something that is not finite.

    Attributes:
        order: how many values were looked at before; equal on all ranks of a group.
        where: the layer and sublayer that gave it.
        what: "NaN", else "infinity".
    """

    order: int
    where: str
    what: str


class FirstNonFinite(Tap):
    """Looks at every complete write and state of the stream; every rank attaches one and looks in the same order.

    Attributes:
        found: the first place on this rank.
    """

    def __init__(self) -> None:
        self.found: Place | None = None
        self._looked = 0

    def look(self, where: str, value: Tensor) -> None:
        """Notes a value of which some element is not finite, if it is the first."""
        if self.found is None and not bool(value.isfinite().all()):
            self.found = Place(self._looked, where, "NaN" if bool(value.isnan().any()) else "infinity")
        self._looked += 1

    def look_at_logits(self, logits: ShardedLogits) -> None:
        self.look(LM_HEAD, logits.valid)

    def on_stream(self, site: Site, value: Tensor, layout: Layout) -> Tensor:
        self.look(describe(site), value)
        return value


class FirstNonFiniteGradient(FirstNonFinite):
    """The same of the gradients that a backward brings to these points, in the order of the backward."""

    def on_stream(self, site: Site, value: Tensor, layout: Layout) -> Tensor:
        if value.requires_grad:
            value.register_hook(lambda gradient: self.look(f"the gradient of {describe(site)}", gradient))
        return value


def describe(site: Site) -> str:
    """The sublayer of a site, in words."""
    return _OF_NO_LAYER[site.point] if site.layer is None else _OF_A_LAYER[site.point].format(site.layer)


def first_of_all(found: Place | None, groups: Sequence[TensorParallelGroup]) -> Place | None:
    """The first place of all ranks of all the groups, on each of them. Every rank calls it."""
    for group in groups:
        places: list[Place | None] = group.communicator.all_gather_object(found)
        found = min((place for place in places if place is not None), default=None)
    return found


def in_words(place: Place | None) -> str:
    """The end of a sentence that says what is not finite."""
    if place is None:
        return "in a second pass every sublayer was finite"
    return f"first {place.what} is in {place.where}"
