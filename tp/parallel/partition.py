"""Who owns what: pure arithmetic on sizes and the tensor-parallel degree t.

Every function returns the ranges of all ranks, in rank order, so that a caller can see its own share,
a peer's, and who shares what, without a process group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

FEATURE_BLOCK = 64
"""Width, in features, of the blocks in which an MLP's intermediate size is dealt out."""


def ceil_div(numerator: int, denominator: int) -> int:
    """⌈numerator / denominator⌉ for non-negative integers."""
    return -(-numerator // denominator)


def query_head_ranges(num_heads: int, tp_size: int) -> tuple[range, ...]:
    """Query heads of each rank: [⌊r·q/t⌋, ⌊(r+1)·q/t⌋)."""
    return tuple(range(r * num_heads // tp_size, (r + 1) * num_heads // tp_size) for r in range(tp_size))


def kv_head_ranges(num_heads: int, num_kv_heads: int, tp_size: int) -> tuple[range, ...]:
    """KV heads of each rank: exactly those that its query heads read. Ranges of neighbours may overlap."""
    group_size = num_heads // num_kv_heads
    return tuple(
        range(heads.start // group_size, ceil_div(heads.stop, group_size))
        for heads in query_head_ranges(num_heads, tp_size)
    )


def feature_ranges(num_features: int, tp_size: int) -> tuple[range, ...]:
    """Intermediate features of each rank, in whole blocks: [⌈r·b/t⌉, ⌈(r+1)·b/t⌉) of b blocks.

    Blocks are `FEATURE_BLOCK` wide, or 1 wide where there would be fewer than one block a rank. The rule
    rounds up where the rule of heads rounds down, so that the two remainders fall on different ranks.
    """
    block = FEATURE_BLOCK if ceil_div(num_features, FEATURE_BLOCK) >= tp_size else 1
    blocks = ceil_div(num_features, block)
    bounds = [min(num_features, ceil_div(r * blocks, tp_size) * block) for r in range(tp_size + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


def chunk_ranges(num_items: int, tp_size: int) -> tuple[range, ...]:
    """Vocabulary rows or tokens of each rank, in chunks of ⌈n/t⌉; late ranks may own fewer, or none."""
    chunk = ceil_div(num_items, tp_size)
    return tuple(range(min(num_items, r * chunk), min(num_items, (r + 1) * chunk)) for r in range(tp_size))


@dataclass(frozen=True)
class HeadRun:
    """A run of query heads, all of whose KV heads serve the same number of them.

    Attributes:
        queries: local query heads, a contiguous range.
        kv_heads: local KV heads that they read, a contiguous range; len(queries) is a multiple of its length.
    """

    queries: range
    kv_heads: range

    @property
    def queries_per_kv_head(self) -> int:
        return len(self.queries) // len(self.kv_heads)


def uniform_runs(num_heads: int, num_kv_heads: int, tp_size: int, tp_rank: int) -> tuple[HeadRun, ...]:
    """Cuts a rank's query heads into at most three uniform runs: group tail, whole groups, group head."""
    group_size = num_heads // num_kv_heads
    heads = query_head_ranges(num_heads, tp_size)[tp_rank]
    first_kv_head = heads.start // group_size
    counts: dict[int, int] = {}
    for head in heads:
        counts[head // group_size] = counts.get(head // group_size, 0) + 1
    runs: list[HeadRun] = []
    next_query = 0
    for per_kv_head, members in groupby(counts.items(), key=lambda item: item[1]):
        kv_heads = [kv_head for kv_head, _ in members]
        stop_query = next_query + per_kv_head * len(kv_heads)
        local = range(kv_heads[0] - first_kv_head, kv_heads[-1] + 1 - first_kv_head)
        runs.append(HeadRun(range(next_query, stop_query), local))
        next_query = stop_query
    return tuple(runs)


@dataclass(frozen=True)
class HeldSegment:
    """Consecutive units held by the same ranks."""

    units: range
    holders: tuple[int, ...]


def held_segments(ranges: Sequence[range]) -> Iterator[HeldSegment]:
    """Cuts units dealt out as `ranges` (which may overlap) wherever the set of ranks that hold a unit changes."""
    edges = sorted({edge for owned in ranges for edge in (owned.start, owned.stop)})
    for start, stop in pairwise(edges):
        holders = tuple(rank for rank, owned in enumerate(ranges) if start in owned)
        if holders:
            yield HeldSegment(range(start, stop), holders)


@dataclass(frozen=True)
class Part:
    """A slice of one tensor of the Hub layout, and where it lies in this rank's parameter.

    Padding of a parameter belongs to no part. Along every dimension but `dim` the part is whole.

    Attributes:
        name: the tensor's name in the Hub layout. Inside a module: the sibling that the slice belongs to
            ("k_proj" in a fused qkv_proj), or "" for the module itself; `tp.layers.parameter.named_parts`
            completes it.
        dim: the dimension that is cut.
        global_start, length: the slice of the Hub tensor along `dim`.
        local_start: where the slice begins in the local parameter along `dim`.
        global_length: size of the whole Hub tensor along `dim`.
        sharers: all ranks that hold this same slice, ascending; the first writes and counts it.
    """

    name: str
    dim: int
    global_start: int
    length: int
    local_start: int
    global_length: int
    sharers: tuple[int, ...]


def shared_parts(
    name: str, ranges: Sequence[range], tp_rank: int, *, unit: int, dim: int, local_start: int, global_length: int
) -> Iterator[Part]:
    """Parts of one Hub tensor on one rank, cut wherever the set of ranks that hold a unit changes.

    Args:
        ranges: units (heads, features, vocabulary rows) of every rank; they may overlap.
        unit: elements of `dim` a unit takes (head_dim for heads).
        local_start: where this tensor begins in the local parameter.
    """
    own = ranges[tp_rank]
    for segment in held_segments(ranges):
        if tp_rank in segment.holders:
            yield Part(
                name=name,
                dim=dim,
                global_start=segment.units.start * unit,
                length=len(segment.units) * unit,
                local_start=local_start + (segment.units.start - own.start) * unit,
                global_length=global_length,
                sharers=segment.holders,
            )
