"""Attention of one new token a sequence over this rank's KV cache, for a whole batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tp.kernels.statistics import statistics_dtype
from tp.kernels.triton.use import uses_triton
from tp.parallel.partition import HeadRun

MAX_HEAD_DIM = 256
"""Of the Triton kernel."""


@dataclass(frozen=True)
class QueryGroups:
    """Which query heads each KV head of this rank serves; as many or as few as the partition gave it.

    Attributes:
        bounds: [KV heads + 1] int32 on the cache's device: KV head h serves queries bounds[h] to bounds[h + 1] − 1.
        sizes: query heads of each KV head.
    """

    bounds: Tensor
    sizes: tuple[int, ...]

    @classmethod
    def of_runs(cls, runs: Sequence[HeadRun], device: torch.device | str) -> QueryGroups:
        """From the uniform runs of a rank, which follow one another."""
        sizes = tuple(run.queries_per_kv_head for run in runs for _ in run.kv_heads)
        bounds = torch.tensor([0, *sizes], device="cpu").cumsum(0).to(device=device, dtype=torch.int32)
        return cls(bounds, sizes)


def cache_attention(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    lengths: Tensor,
    groups: QueryGroups,
    window: int | None = None,
) -> Tensor:
    """softmax(q kᵀ / √d) v of each sequence's last token over its cached ones, its own included; [B, H, d].

    Statistics in float32. On CUDA nothing is read back to the host, and shapes alone decide what is launched: it can
    be captured in a CUDA graph and replayed with other slots and lengths. Inference only: it has no backward.

    Args:
        q: [B, H, d].
        key, value: [slots, KV heads, capacity, d]; what lies past a sequence's length is never used.
        slots: [B] int32 or int64 on q's device: each sequence's row of the cache.
        lengths: likewise, from 0 to the capacity: its cached tokens. 0 gives zeros.
        groups: query heads of each KV head.
        window: how many last tokens are seen; None = all.
    """
    if not uses_triton("cache_attention", q) or q.shape[-1] > MAX_HEAD_DIM:
        return plain_cache_attention(q, key, value, slots, lengths, groups, window)
    from tp.kernels.triton.cache_attention import attend_to_cache

    return attend_to_cache(q, key, value, slots, lengths, groups.bounds, max(groups.sizes), window)


def plain_cache_attention(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    lengths: Tensor,
    groups: QueryGroups,
    window: int | None = None,
) -> Tensor:
    """`cache_attention` in torch operations, one sequence after the other."""
    output = torch.zeros_like(q, memory_format=torch.contiguous_format)
    kv_heads = torch.repeat_interleave(torch.tensor(groups.sizes, device=q.device))
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        if length:
            tokens = slice(0 if window is None else max(0, length - window), length)
            output[row] = _attend(q[row], key[slot, kv_heads, tokens], value[slot, kv_heads, tokens])
    return output


def _attend(q_Hd: Tensor, k_HTd: Tensor, v_HTd: Tensor) -> Tensor:
    """One query of each head over the tokens of its KV head, all in the statistics dtype, rounded once."""
    wide = statistics_dtype(q_Hd.dtype)
    scores = (k_HTd.to(wide) @ q_Hd.to(wide).unsqueeze(-1)).squeeze(-1) * q_Hd.shape[-1] ** -0.5
    attended: Tensor = scores.softmax(-1).unsqueeze(1) @ v_HTd.to(wide)
    return attended.squeeze(1).to(q_Hd.dtype)
