"""The residual stream: x_L = x_0 + Σ_l (a_l + m_l), the one place where ranks' partial sums become states.

    z = stream.read(self.input_layernorm)
    stream.write(self.self_attn(z, ...), site)

`write` hands over a partial sum; `read` combines what is pending (the all-reduce), adds it, and normalises.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tp.errors import LayoutError
from tp.layers.handles import Normed, Partial
from tp.layers.layout import Layout, Replicate
from tp.layers.norm import Norm, RMSNorm
from tp.layers.tap import Site, Tap


@dataclass(frozen=True)
class PendingWrite:
    """A write that is still to be combined and added.

    Attributes:
        norm: of the write itself (sandwich placement).
        then: of the state after the add (post-norm placement).
    """

    partial: Partial
    site: Site
    norm: Norm | None
    then: Norm | None

    @property
    def bare(self) -> bool:
        """Whether nothing stands between the combined write and the next norm but the add."""
        return self.norm is None and self.then is None


@dataclass
class ResidualStream:
    """The stream of one step: a base state and the writes that have not been added yet.

    A layer takes and returns it. A write resolves in one order: u = Σ_ranks value (accumulated in float32, in rank
    order where we own the sum, rounded to the stream's dtype); u + bias, once; norm; tap; base ← round(base + u);
    then the state's own norm; tap.

    Attributes:
        layout: how [N, D] lies over the ranks.
        base: this layout's share of the state without the pending writes; None before the embedding's write.
        pending: writes in the order in which they were made.
        tap: captures or edits complete writes and states.
    """

    layout: Layout
    base: Tensor | None = None
    pending: list[PendingWrite] = field(default_factory=list)
    tap: Tap | None = None

    def write(self, partial: Partial, site: Site, norm: Norm | None = None, then: Norm | None = None) -> None:
        """Hands over one rank's addend of what a sublayer writes: [N, D], to be combined at the next read.

        Args:
            norm: u ← norm(u), before the add.
            then: x ← then(x), after it.

        Raises:
            LayoutError: not a `Partial`, of another group, or not one row a token.
        """
        if not isinstance(partial, Partial):
            raise LayoutError(f"{site}: the stream takes a Partial, not a {type(partial).__name__}")
        if partial.group is not self.layout.group:
            raise LayoutError(f"{site}: the write belongs to {partial.group}, the stream to {self.layout.group}")
        if partial.value.shape[0] != self.layout.num_tokens:
            raise LayoutError(f"{site}: {partial.value.shape[0]} rows written to {self.layout.num_tokens} tokens")
        self.pending.append(PendingWrite(partial, site, norm, then))

    def read(self, norm: Norm | None) -> Normed:
        """Norm(x) of the settled state x, or x itself, in the stream's layout.

        Without gradients and taps, a bare write's reduction, its add and an RMSNorm are one operation.
        """
        if norm is None:
            return Normed(self.settle(), self.layout)
        if not isinstance(norm, RMSNorm) or self.tap is not None or torch.is_grad_enabled():
            return Normed(norm(self.settle()), self.layout)
        if not self.pending or not self.pending[-1].bare:
            return Normed(norm(self.settle()), self.layout)
        partial = self.pending.pop().partial
        if self.pending:
            self.settle()
        self.base, normed = self.layout.combine_add_norm(partial.value, partial.bias, self.base, norm.weight, norm.eps)
        return Normed(normed, self.layout)

    def settle(self) -> Tensor:
        """Combines and adds everything pending; returns this layout's share of the state."""
        for write in self.pending:
            update = write.partial.plus_bias(self.layout.combine(write.partial.value))
            if write.norm is not None:
                update = write.norm(update)
            update = self._tapped(write.site, update)
            state = update if self.base is None else self.base + update
            if write.then is not None:
                state = write.then(state)
            self.base = self._tapped(write.site.state_after, state)
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
            pending=[replace(write, partial=write.partial.select(rows)) for write in self.pending],
        )

    def _tapped(self, site: Site, value: Tensor) -> Tensor:
        return value if self.tap is None else self.tap.on_stream(site, value, self.layout)
