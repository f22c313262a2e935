"""Editing what sublayers and heads write, and the states between them: the same result at every degree and layout.

Interventions on activations: causal mediation, Vig et al. 2020 (arXiv:2004.12265). An edit of a write changes the
states after it, as if the sublayer had written that.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tp.config import ModelConfig
from tp.errors import RequestError
from tp.inspection.points import check_heads, describe, integers, site_of
from tp.inspection.rows import Rows, rows_at
from tp.inspection.same_taps import check_same_tap
from tp.layers.layout import Layout
from tp.layers.step import Step
from tp.layers.tap import Site, Tap
from tp.models.causal_lm import CausalLM
from tp.models.taps import attached
from tp.parallel.agreement import Statement
from tp.parallel.group import TensorParallelGroup
from tp.parallel.mappings import copy_to_tensor_parallel_region

Change = Callable[[Tensor, Tensor], Tensor]
"""(what is there, the edit's operand), of one shape or a scalar operand → what goes on in its place."""


@dataclass(frozen=True)
class Edit:
    """A change of what passes a point; made by `replace`, `add`, `scale` and `zero`.

    Attributes:
        point, layer: where; of no layer: "embed" and "final_norm".
        change: what is done.
        operand: with what, equal on all ranks.
        positions: of the tokens that are changed, in their own sequences; negative ones count from the end of a
            sequence's tokens in the step. None: all tokens.
        heads: global indices of the query heads that are changed, of "z"; None: all.
    """

    point: str
    layer: int | None
    change: Change
    operand: Tensor
    positions: tuple[int, ...] | None
    heads: tuple[int, ...] | None


def replace(
    point: str,
    layer: int | None,
    value: Tensor | float,
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Edit:
    """Puts `value` in the place of what passes.

    Args:
        point: "embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post", "final_norm", or "z".
        layer: None for "embed" and "final_norm".
        value: a number; [D]; or [rows, D] with a row for each of `positions`, for every sequence alike, or, where they
            are None, for each token of the step. Of "z": a number, [head_dim], [heads, head_dim] or
            [rows, heads, head_dim], with as many heads as `heads`, or all. Equal on all ranks; cast to what it meets.
        positions, heads: see `Edit`.
    """
    return _edit(point, layer, _replaced, value, positions, heads)


def add(
    point: str,
    layer: int | None,
    value: Tensor | float,
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Edit:
    """Adds `value`; arguments as `replace`."""
    return _edit(point, layer, torch.add, value, positions, heads)


def scale(
    point: str,
    layer: int | None,
    factor: Tensor | float,
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Edit:
    """Multiplies by `factor`; arguments as `replace`."""
    return _edit(point, layer, torch.mul, factor, positions, heads)


def zero(
    point: str,
    layer: int | None = None,
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Edit:
    """Ablation: puts zeros in the place of what passes; arguments as `replace`."""
    return replace(point, layer, 0.0, positions, heads)


@contextmanager
def edit(model: CausalLM, *edits: Edit) -> Iterator[None]:
    """Within the block, makes the edits in every forward of `model`, in this order. Every rank opens it alike.

    Where gradients are recorded they flow through the edits; a value that wants a gradient gets the whole one on every
    rank. Captures and edits that were opened before see what passes before these edits, later ones what passes after.

    Raises:
        RequestError: a point, layer or head that there is not, heads of a point that has none, or a value of the wrong
            shape. Values with as many rows as the step has tokens are checked when a step comes.
        CommunicationError: ranks that edit differently, or with different values; on every rank, at the first forward.
    """
    for each in edits:
        _check(each, model.config)
    with attached(model, _Edits(edits, model.config, model.group)):
        yield


class _Edits(Tap):
    """Hands each forward a tap of its own: a backward may compute layers of any earlier forward again."""

    def __init__(self, edits: Sequence[Edit], config: ModelConfig, group: TensorParallelGroup) -> None:
        self._edits, self._config, self._group = edits, config, group
        self._compared = False

    def on_step(self, step: Step) -> Tap:
        if not self._compared:
            check_same_tap(self._group, _statement(self._edits))
            self._compared = True
        by_site: dict[Site, list[_StepEdit]] = {}
        for each in self._edits:
            _check_rows(each, step)
            rows = rows_at(step, each.positions)
            if len(rows):  # the same on every rank
                total = step.num_tokens if each.positions is None else len(each.positions)
                here = by_site.setdefault(site_of(each.point, each.layer, self._config), [])
                here.append(_StepEdit(each, rows, total, self._group))
        return _StepEdits(by_site, range(self._config.num_attention_heads))


@dataclass(frozen=True)
class _StepEdits(Tap):
    """The edits of one forward."""

    by_site: dict[Site, list[_StepEdit]]
    all_heads: range

    def on_stream(self, site: Site, value: Tensor, layout: Layout) -> Tensor:
        for each in self.by_site.get(site, ()):
            value = each.of_stream(value, layout)
        return value

    def on_heads(self, layer: int, z_NHd: Tensor, heads: range) -> Tensor:
        for each in self.by_site.get(Site(layer, "z"), ()):
            z_NHd = each.of_heads(z_NHd, heads, self.all_heads)
        return z_NHd


@dataclass(frozen=True)
class _Places:
    """Along one dimension: the local indices that are changed, and the operand's, of `total`, that they take."""

    local: Tensor
    entries: Tensor
    total: int


@dataclass(frozen=True)
class _StepEdit:
    """One edit in one forward.

    Attributes:
        rows: what it changes of the step.
        total: rows that an operand with rows has.
    """

    edit: Edit
    rows: Rows
    total: int
    group: TensorParallelGroup

    def of_stream(self, value: Tensor, layout: Layout) -> Tensor:
        """The edited share of [N, D]."""
        operand = self.edit.operand.to(value.device)
        if layout.sharded:
            operand = copy_to_tensor_parallel_region(operand, self.group)  # each rank has the gradient of its tokens
        if operand.dim():
            operand = operand.unsqueeze(-2)
        rows = _Places(*self.rows.of_rank(layout), self.total)
        only = torch.zeros(1, dtype=torch.int64, device=value.device)
        return self._changed(value.unsqueeze(1), operand, rows, _Places(only, only, 1)).squeeze(1)

    def of_heads(self, z_NHd: Tensor, own: range, all_heads: range) -> Tensor:
        """The edited [N, len(own), head_dim] of this rank's heads."""
        operand = copy_to_tensor_parallel_region(self.edit.operand.to(z_NHd.device), self.group)
        chosen = all_heads if self.edit.heads is None else self.edit.heads
        pairs = [(head - own.start, entry) for entry, head in enumerate(chosen) if head in own]
        local, entries = torch.tensor(pairs, dtype=torch.int64, device=z_NHd.device).view(-1, 2).unbind(1)
        rows = _Places(self.rows.indices, self.rows.entries, self.total)
        return self._changed(z_NHd, operand, rows, _Places(local, entries, len(chosen)))

    def _changed(self, x_NHd: Tensor, operand: Tensor, rows: _Places, heads: _Places) -> Tensor:
        """A rank without any of the rows or heads does the same with empty tensors: backward it enters a collective."""
        places = rows.local.unsqueeze(1), heads.local
        if operand.dim():
            whole = operand.expand(rows.total, heads.total, -1)
            operand = whole[rows.entries.unsqueeze(1), heads.entries].to(x_NHd.dtype)
        return x_NHd.index_put(places, self.edit.change(x_NHd[places], operand))


def _edit(
    point: str,
    layer: int | None,
    change: Change,
    operand: Tensor | float,
    positions: Sequence[int] | None,
    heads: Sequence[int] | None,
) -> Edit:
    if not isinstance(operand, Tensor):
        operand = torch.tensor(operand, dtype=torch.float64)
    given = (("positions", positions), ("heads", heads))
    as_tuples = (None if numbers is None else integers(what, numbers) for what, numbers in given)
    return Edit(point, layer, change, operand, *as_tuples)


def _replaced(current: Tensor, operand: Tensor) -> Tensor:
    return operand.to(current.dtype).expand_as(current)


def _statement(edits: Sequence[Edit]) -> Statement:
    """What must be equal on all ranks, in words; values as digests."""
    statement = {"call": "edit", "number of edits": str(len(edits))}
    for index, each in enumerate(edits):
        statement.update(_statement_of(f"edit {index}", each))
    return statement


def _statement_of(name: str, each: Edit) -> dict[str, str]:
    operand = each.operand.detach().cpu().contiguous()
    digest = zlib.crc32(operand.reshape(-1).view(torch.uint8).numpy().tobytes())
    return {
        f"{name}, its point": f"{each.point} of layer {each.layer}",
        f"{name}, its change": getattr(each.change, "__name__", ""),
        f"{name}, its value": f"{list(operand.shape)} {operand.dtype} (digest {digest:08x})",
        f"{name}, its positions": str(each.positions),
        f"{name}, its heads": str(each.heads),
    }


def _check(each: Edit, config: ModelConfig) -> None:
    site = site_of(each.point, each.layer, config)
    if each.point == "pattern":
        raise RequestError("attention patterns are captured only: edit z, or what the heads read")
    of_heads = each.point == "z"
    if each.heads is not None and not of_heads:
        raise RequestError(f"{describe(site)} has no heads: leave heads out, or edit z")
    check_heads(each.heads or (), config)
    num_heads = config.num_attention_heads if each.heads is None else len(each.heads)
    of_token = [num_heads, config.head_dim] if of_heads else [config.hidden_size]
    rows = "rows" if each.positions is None else len(each.positions)
    whole, given = [rows, *of_token], list(each.operand.shape)
    fits = all(wanted in (size, "rows") for size, wanted in zip(given[::-1], whole[::-1], strict=False))
    if not fits or len(given) > len(whole):
        shapes = f"{of_token} or [{', '.join(map(str, whole))}]"
        raise RequestError(f"the value for {describe(site)} is {given}: it must be a number, {shapes}")


def _check_rows(each: Edit, step: Step) -> None:
    """Values that have a row for each token of a step."""
    with_rows = each.operand.dim() == (3 if each.point == "z" else 2)
    if with_rows and each.positions is None and len(each.operand) != step.num_tokens:
        raise RequestError(
            f"the value for {each.point} has {len(each.operand)} rows, the step {step.num_tokens} tokens: "
            "say which positions its rows are for"
        )
