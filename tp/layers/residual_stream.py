"""The residual stream: x_L = x_0 + Σ_l (a_l + m_l), the one place where ranks' partial sums become states.

    z = stream.read(self.input_layernorm)
    stream.write(self.self_attn(z, ...), site)

`write` hands over a partial sum; `read` combines what is pending (the all-reduce), adds it, and normalises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tp.errors import LayoutError
from tp.layers.handles import Normed, Partial
from tp.layers.layout import Layout, Replicate
from tp.layers.norm import RMSNorm


class Site(NamedTuple):
    """Where in the model a value is written: (layer index, "attn_out" | "mlp_out"), or (None, "embed")."""

    layer: int | None
    point: str


Tap = Callable[[Site, Tensor, Layout], Tensor]
"""Sees each complete write u in the stream's layout and returns it, or an edited one. Set on all ranks or none."""


@dataclass
class ResidualStream:
    """The stream of one step: a base state and the writes that have not been added yet.

    A layer takes and returns it. A write resolves in one order: u = Σ_ranks value (accumulated in float32, in rank
    order where we own the sum, rounded to the stream's dtype); u + bias, once; tap; base ← round(base + u).

    Attributes:
        layout: how [N, D] lies over the ranks.
        base: this layout's share of the state without the pending writes; None before the embedding's write.
        pending: writes in the order in which they were made.
        tap: captures or edits complete writes.
    """

    layout: Layout
    base: Tensor | None = None
    pending: list[tuple[Partial, Site]] = field(default_factory=list)
    tap: Tap | None = None

    def write(self, partial: Partial, site: Site) -> None:
        """Hands over one rank's addend of what a sublayer writes: [N, D], to be combined at the next read.

        Raises:
            LayoutError: not a `Partial`, of another group, or not one row a token.
        """
        if not isinstance(partial, Partial):
            raise LayoutError(f"{site}: the stream takes a Partial, not a {type(partial).__name__}")
        if partial.group is not self.layout.group:
            raise LayoutError(f"{site}: the write belongs to {partial.group}, the stream to {self.layout.group}")
        if partial.value.shape[0] != self.layout.num_tokens:
            raise LayoutError(f"{site}: {partial.value.shape[0]} rows written to {self.layout.num_tokens} tokens")
        self.pending.append((partial, site))

    def read(self, norm: RMSNorm) -> Normed:
        """Norm(x) of the settled state x, in the stream's layout.

        Without gradients and taps, the last write's reduction, its add and the norm are one operation.
        """
        if not self.pending or self.tap is not None or torch.is_grad_enabled():
            return Normed(norm(self.settle()), self.layout)
        partial, _ = self.pending.pop()
        if self.pending:
            self.settle()
        self.base, normed = self.layout.combine_add_norm(partial.value, partial.bias, self.base, norm.weight, norm.eps)
        return Normed(normed, self.layout)

    def settle(self) -> Tensor:
        """Combines and adds everything pending; returns this layout's share of the state."""
        for partial, site in self.pending:
            update = partial.plus_bias(self.layout.combine(partial.value))
            if self.tap is not None:
                update = self.tap(site, update, self.layout)
            self.base = update if self.base is None else self.base + update
        self.pending.clear()
        if self.base is None:
            raise LayoutError("the residual stream was read before anything was written to it")
        return self.base

    def take(self, rows: Tensor) -> ResidualStream:
        """A stream of the given rows only, whole on every rank; pending writes are cut before they are combined.

        Args:
            rows: [B] int64, token indices of this step, equal on all ranks.
        """
        if self.tap is not None or self.base is None:
            self.settle()  # a tap sees every row
        assert self.base is not None
        return ResidualStream(
            layout=Replicate(self.layout.group, len(rows)),
            base=self.layout.select(self.base, rows),
            pending=[(partial.select(rows), site) for partial, site in self.pending],
        )
