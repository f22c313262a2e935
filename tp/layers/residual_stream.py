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
from tp.layers.handles import Combined, LinearPartial, Normed, Partial
from tp.layers.layout import Layout, Replicate
from tp.layers.norm import Norm, RMSNorm
from tp.layers.tap import Site, Tap


@dataclass(frozen=True)
class PendingWrite:
    """A write that is still to be combined, where it is not already, and added.

    Attributes:
        norm: of the write itself (sandwich placement).
        then: of the state after the add (post-norm placement).
    """

    update: Partial | Combined
    site: Site
    norm: Norm | None
    then: Norm | None

    @property
    def bare(self) -> Partial | None:
        """The partial sum, where nothing but its reduction and its add stands between it and the next norm."""
        return self.update if isinstance(self.update, Partial) and self.norm is self.then is None else None

    def combined(self, layout: Layout) -> Tensor:
        """The complete write, before its norm."""
        if isinstance(self.update, Combined):
            return self.update.value
        return self.update.plus_bias(layout.combine(self.update.value))


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

    def write(
        self, partial: Partial | LinearPartial, site: Site, norm: Norm | None = None, then: Norm | None = None
    ) -> None:
        """Hands over one rank's addend of what a sublayer writes: [N, D], to be combined at the next read.

        Args:
            norm: u ← norm(u), before the add.
            then: x ← then(x), after it.

        Raises:
            LayoutError: not a partial sum, of another group, or not one row a token.
        """
        if not isinstance(partial, (Partial, LinearPartial)):
            raise LayoutError(f"{site}: the stream takes a Partial, not a {type(partial).__name__}")
        if partial.group is not self.layout.group:
            raise LayoutError(f"{site}: the write belongs to {partial.group}, the stream to {self.layout.group}")
        if partial.num_rows != self.layout.num_tokens:
            raise LayoutError(f"{site}: {partial.num_rows} rows written to {self.layout.num_tokens} tokens")
        self.pending.append(PendingWrite(partial.written_in(self.layout), site, norm, then))

    def read(self, norm: Norm | None) -> Normed:
        """Norm(x) of the settled state x, or x itself, in the stream's layout.

        Without gradients and taps, a bare write's reduction, its add and an RMSNorm are one operation.
        """
        if norm is None:
            return Normed(self.settle(), self.layout)
        bare = self.pending[-1].bare if self.pending else None
        if bare is None or not isinstance(norm, RMSNorm) or self.tap is not None or torch.is_grad_enabled():
            return Normed(norm(self.settle()), self.layout)
        self.pending.pop()
        if self.pending:
            self.settle()
        self.base, normed = self.layout.combine_add_norm(bare.value, bare.bias, self.base, norm.weight, norm.eps)
        return Normed(normed, self.layout)

    def settle(self) -> Tensor:
        """Combines and adds everything pending; returns this layout's share of the state."""
        for write in self.pending:
            update = write.combined(self.layout)
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
        if self.tap is not None or self.base is None or any(isinstance(w.update, Combined) for w in self.pending):
            self.settle()  # a tap sees every row; what is combined lies as the base does
        assert self.base is not None
        return ResidualStream(
            layout=Replicate(self.layout.group, len(rows)),
            base=self.layout.select(self.base, rows),
            pending=[replace(w, update=w.update.select(rows)) for w in self.pending if isinstance(w.update, Partial)],
        )

    def _tapped(self, site: Site, value: Tensor) -> Tensor:
        return value if self.tap is None else self.tap.on_stream(site, value, self.layout)
