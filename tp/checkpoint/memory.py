"""Whether a rank's weights and cache fit in its memory, asked before either is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from tp.checkpoint.free_memory import free_memory
from tp.config import ModelConfig
from tp.errors import CapacityError
from tp.layers.kv_cache import KVCache
from tp.parallel.group import TensorParallelGroup


@dataclass(frozen=True)
class MemoryBudget:
    """What a rank needs and has, in bytes, and what the whole group can serve.

    Attributes:
        weight_bytes, cache_bytes, free_bytes: this rank's.
        longest_context: tokens that each of the sequences may have, on the rank that has least room; at most
            the model's context. Equal on all ranks.
    """

    weight_bytes: int
    cache_bytes: int
    free_bytes: int
    longest_context: int


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a rank's weights, tied ones once. The model may be on the meta device."""
    return sum(weight.nbytes for weight in (*model.parameters(), *model.buffers()))


def check_fits(
    config: ModelConfig,
    group: TensorParallelGroup,
    *,
    weight_bytes: int,
    num_slots: int,
    capacity: int,
    dtype: torch.dtype,
    free_bytes: int | None = None,
) -> MemoryBudget:
    """Checks weights and cache against free memory on every rank. Every rank calls it, before it allocates.

    Args:
        weight_bytes: of this rank's parameters that are still to be allocated; 0 for a model that is loaded.
        num_slots: sequences that the cache holds.
        capacity: tokens that each may have.
        dtype: of the cache.
        free_bytes: this rank's free memory; measured where it is not given.

    Raises:
        CapacityError: too little on some rank; the same on all ranks, with what it needs, what is free, and the
            longest context that fits on every rank.
    """
    free = free_memory(group) if free_bytes is None else free_bytes
    cache_bytes = KVCache.bytes_needed(config, group, num_slots, capacity, dtype)
    room = free - weight_bytes
    longest = largest(
        lambda tokens: KVCache.bytes_needed(config, group, num_slots, tokens, dtype) <= room, config.longest_context
    )
    own = MemoryBudget(weight_bytes, cache_bytes, free, longest)
    budgets: list[MemoryBudget] = group.communicator.all_gather_object(own)
    longest_context = min(budget.longest_context for budget in budgets)
    for rank, budget in enumerate(budgets):
        if budget.weight_bytes + budget.cache_bytes > budget.free_bytes:
            raise CapacityError(_too_little(rank, budget, num_slots, capacity, longest_context))
    return MemoryBudget(weight_bytes, cache_bytes, free, longest_context)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 0 to `most` that fits, where all below one that fits do; 0 counts as fitting."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _too_little(rank: int, budget: MemoryBudget, num_slots: int, capacity: int, longest_context: int) -> str:
    needed = budget.weight_bytes + budget.cache_bytes
    remedy = (
        f"the longest context that fits is {longest_context} tokens"
        if longest_context
        else "the longest context that fits is 0: use more ranks or a smaller dtype"
    )
    return (
        f"rank {rank} needs {mebibytes(needed)} ({mebibytes(budget.weight_bytes)} of weights, "
        f"{mebibytes(budget.cache_bytes)} of cache for {num_slots} x {capacity} tokens), "
        f"{mebibytes(budget.free_bytes)} is free: {remedy}"
    )


def mebibytes(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / 2**20:,.1f} MiB"
