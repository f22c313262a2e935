"""Capturing what passes the named points of a forward, at any degree and in either layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tp.config import ModelConfig
from tp.inspection.activation_cache import ActivationCache, CapturedTokens, ForwardRecord
from tp.inspection.points import check_heads, describe, integers, sites_of
from tp.inspection.rows import Rows, own_tokens, rows_at
from tp.inspection.same_taps import check_same_tap
from tp.layers.layout import Layout
from tp.layers.step import Step
from tp.layers.tap import Site, Tap
from tp.models.causal_lm import CausalLM
from tp.models.taps import attached
from tp.parallel.agreement import Statement
from tp.parallel.group import TensorParallelGroup
from tp.parallel.partition import query_head_ranges


@contextmanager
def capture(
    model: CausalLM,
    points: Collection[str],
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    *,
    gradients: bool = False,
    sharded: bool = False,
    device: torch.device | str | None = None,
) -> Iterator[ActivationCache]:
    """Within the block, copies what passes the points in every forward of `model`. Every rank opens it alike.

    It changes no number (docs/inspection.md has the exception). Values are complete (summed over the ranks, the
    write's bias and norm included) and in token order. What activation checkpointing computes again in the backward is
    not captured a second time.

    Args:
        points: of `tp.inspection.POINTS`.
        layers: of the points that belong to layers; None: all.
        positions: of the tokens to keep, in their own sequences; −1 is the last token of each sequence in a step, −2
            the one before. None: all.
        heads: global indices of the query heads to keep of "z" and "pattern"; None: all.
        gradients: also keep the gradients that backward passes bring to the points, see `ActivationCache.gradient`.
        sharded: keep this rank's heads only, and its tokens where they are sharded, and gather nothing; see
            `ActivationCache.own_rows`.
        device: where values go at once, "cpu" say; by default they stay.

    Raises:
        RequestError: a point, layer or head that there is not; on every rank.
        CommunicationError: ranks that ask for different things; on every rank, at the first forward.
    """
    kept_heads = tuple(sorted(range(model.config.num_attention_heads) if heads is None else integers("heads", heads)))
    check_heads(kept_heads, model.config)
    sites = sites_of(points, layers, model.config)
    positions = None if positions is None else integers("positions", positions)
    plan = _Plan(model.group, model.config, sites, positions, kept_heads, gradients, sharded, device)
    cache = ActivationCache(model.config, kept_heads, sharded)
    with attached(model, _Capture(plan, cache)):
        yield cache


@dataclass(frozen=True)
class _Plan:
    """What is captured, and how; see `capture`."""

    group: TensorParallelGroup
    config: ModelConfig
    sites: frozenset[Site]
    positions: Sequence[int] | None
    heads: tuple[int, ...]
    gradients: bool
    sharded: bool
    device: torch.device | str | None

    def statement(self) -> Statement:
        """What must be equal on all ranks, in words."""
        return {
            "call": "capture",
            "points of a capture": ", ".join(sorted(map(describe, self.sites))),
            "positions of a capture": str(self.positions),
            "heads of a capture": str(self.heads),
            "gradients of a capture": str(self.gradients),
            "sharded of a capture": str(self.sharded),
        }

    def rows_of(self, value: Tensor, rows: Rows, layout: Layout) -> Tensor:
        """A copy of the chosen rows of [N, D], from this layout's share of it."""
        indices, _ = rows.of_rank(layout)
        own = value.index_select(0, indices)
        if layout.sharded and not self.sharded:
            own = self.group.communicator.all_gather(own, rows.sizes(layout))
        return own.to(self.device)

    def heads_of(self, value: Tensor, own: range) -> Tensor:
        """A copy of the chosen heads of [all query heads, …], from this rank's."""
        chosen = [head - own.start for head in self.heads if head in own]
        of_rank = value.index_select(0, torch.tensor(chosen, dtype=torch.int64, device=value.device))
        if not self.sharded:
            ranges = query_head_ranges(self.config.num_attention_heads, self.group.size)
            sizes = [sum(head in heads for head in self.heads) for heads in ranges]
            of_rank = self.group.communicator.all_gather(of_rank, sizes)
        return of_rank.to(self.device)


class _Capture(Tap):
    """Hands each forward a tap of its own: a backward may compute layers of any earlier forward again."""

    def __init__(self, plan: _Plan, cache: ActivationCache) -> None:
        self._plan, self._cache = plan, cache

    def on_step(self, step: Step) -> Tap:
        if not self._cache.forwards:
            check_same_tap(self._plan.group, self._plan.statement())
        rows = rows_at(step, self._plan.positions)
        record = ForwardRecord(_tokens_of(step, rows, forward=len(self._cache.forwards)), torch.arange(len(rows)))
        self._cache.forwards.append(record)
        return _ForwardCapture(self._plan, record, step, rows)


class _ForwardCapture(Tap):
    """Fills the record of one forward."""

    def __init__(self, plan: _Plan, record: ForwardRecord, step: Step, rows: Rows) -> None:
        self._plan, self._record, self._step, self._rows = plan, record, step, rows

    def on_stream(self, site: Site, value: Tensor, layout: Layout) -> Tensor:
        if site.point == "embed" and self._plan.sharded:
            self._record.own_rows = torch.arange(len(self._rows))[self._rows.within(own_tokens(layout))]
        self._capture(site, value, lambda whole: self._plan.rows_of(whole, self._rows, layout))
        return value

    def on_heads(self, layer: int, z_NHd: Tensor, heads: range) -> Tensor:
        def gather(z_NHd: Tensor) -> Tensor:
            chosen = z_NHd.index_select(0, self._rows.indices)
            return self._plan.heads_of(chosen.transpose(0, 1), heads).transpose(0, 1).contiguous()

        self._capture(Site(layer, "z"), z_NHd, gather)
        return z_NHd

    def wants_pattern(self, layer: int) -> bool:
        site = Site(layer, "pattern")
        return site in self._plan.sites and len(self._record.patterns.get(site, ())) < len(self._step.sequences)

    def on_pattern(self, layer: int, sequence: int, pattern_HTS: Tensor, heads: range) -> None:
        if not self.wants_pattern(layer):
            return
        tokens = self._step.rows()[sequence]
        queries = self._rows.indices[self._rows.within(tokens)] - tokens.start
        captured = self._plan.heads_of(pattern_HTS.index_select(1, queries), heads)
        self._record.patterns.setdefault(Site(layer, "pattern"), []).append(captured)

    def _capture(self, site: Site, value: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
        """Keeps what `gather` makes of a value, and of its gradients; once."""
        if site not in self._plan.sites or site in self._record.values:
            return
        with torch.no_grad():
            self._record.values[site] = gather(value)
        if self._plan.gradients and value.requires_grad:
            value.register_hook(lambda gradient: self._add_gradient(site, gather(gradient.detach())))

    def _add_gradient(self, site: Site, gradient: Tensor) -> None:
        earlier = self._record.gradients.get(site)
        self._record.gradients[site] = gradient if earlier is None else earlier + gradient


def _tokens_of(step: Step, rows: Rows, forward: int) -> CapturedTokens:
    places = [
        (forward, sequence, piece.slot, piece.start + offset)
        for sequence, (piece, tokens) in enumerate(zip(step.sequences, step.rows(), strict=True))
        for offset in (number - tokens.start for number in rows.numbers[rows.within(tokens)])
    ]
    forwards, sequences, slots, positions = torch.tensor(places, dtype=torch.int64).view(-1, 4).unbind(1)
    return CapturedTokens(forwards, sequences, slots, positions, step.token_ids[rows.indices].cpu())
