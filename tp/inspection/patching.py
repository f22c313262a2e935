"""Activation patching: what one prompt's run had, put into another's.

Vig et al. 2020 (arXiv:2004.12265), and causal tracing in Meng et al. 2022 (arXiv:2202.05262).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tp.errors import RequestError
from tp.inspection.activation_cache import ActivationCache
from tp.inspection.editing import Edit, replace
from tp.inspection.points import integers


def patch(
    cache: ActivationCache,
    point: str,
    layer: int | None = None,
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    *,
    source_positions: Sequence[int] | None = None,
    sequence: int = 0,
) -> Edit:
    """An edit that replaces what passes a point by what was captured there of a prompt, of whatever length.

    Args:
        cache: a capture of the source that is not sharded.
        point, layer: as of `replace`.
        positions: which tokens are replaced; None: those at the captured positions, as far as the prompt has them.
        heads: of "z": which query heads are replaced; None: all that were captured.
        source_positions: for each of `positions` the token of the source whose value it gets; negative ones count from
            the source's last captured token. None: the one at the same position.
        sequence: its place in the captured batch.

    Raises:
        RequestError: something that was not captured, or captured more than once, or of two sequences that had that
            place one after the other; another number of source positions.
    """
    if cache.sharded:
        raise RequestError("patching takes whole values: capture without sharded=True")
    rows = _rows_by_position(cache, sequence)
    positions = sorted(rows) if positions is None else integers("positions", positions)
    source_positions = positions if source_positions is None else integers("source_positions", source_positions)
    if len(source_positions) != len(positions):
        raise RequestError(
            f"{len(source_positions)} source positions for {len(positions)} positions: give one for each"
        )
    last = max(rows)
    found = [position if position >= 0 else last + 1 + position for position in source_positions]
    if missing := [position for position in found if position not in rows]:
        raise RequestError(f"position {missing[0]} of the source was not captured: there are {sorted(rows)}")
    value = cache.value(point, layer)[_indices(rows[position] for position in found)]
    if heads is not None:
        heads = integers("heads", heads)
        if missing := [head for head in heads if head not in cache.heads]:
            raise RequestError(f"head {missing[0]} of the source was not captured: there are {list(cache.heads)}")
        value = value[:, _indices(cache.heads.index(head) for head in heads)]
    elif point == "z":
        heads = cache.heads
    return replace(point, layer, value, positions, heads)


def _rows_by_position(cache: ActivationCache, sequence: int) -> dict[int, int]:
    """The cache's row of each position of a sequence."""
    tokens = cache.tokens
    rows = (tokens.sequence == sequence).nonzero().squeeze(1).tolist()
    positions = tokens.position[rows].tolist()
    if not positions:
        raise RequestError(f"nothing was captured of sequence {sequence} of the source")
    if len(set(tokens.slot[rows].tolist())) > 1:  # one had ended, and others moved up
        raise RequestError(
            f"sequence {sequence} of the source is not the same in all forwards: capture one forward of it"
        )
    if len(set(positions)) < len(positions):
        raise RequestError(f"sequence {sequence} of the source was captured more than once: capture one forward of it")
    return dict(zip(positions, rows, strict=True))


def _indices(numbers: Iterable[int]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.int64)
