"""Attention of one new token a sequence over its cached tokens, in Triton: split over the context, then combined.

The method is flash-decoding (Dao, Haziza, Massa and Sizov 2023). The splits of a sequence depend on the cache and the
window alone, neither on lengths, so that the launch can be captured in a CUDA graph, nor on the other sequences.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp.kernels.triton.rows import JOINT_ROUNDINGS, next_power_of_two, on_device_of
from tp.parallel.partition import ceil_div

_MAX_SPLITS = 64
_MIN_QUERIES = 16
"""Rows of the smallest matrix product that the hardware has."""
_BLOCK_BYTES = 16 * 1024
"""Of a block of keys, or of values: so a program needs at most 99 KiB of shared memory, the least that GPUs with
bfloat16 have, where a KV head serves up to 64 query heads (in float32 with d > 128 up to 32)."""
_MOST_QUERIES_STAGED = 32
"""With more, two blocks of keys and values are on their way at a time, and not three."""
_LOWEST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).min)


def attend_to_cache(
    q: Tensor, key: Tensor, value: Tensor, slots: Tensor, lengths: Tensor, query_bounds: Tensor,
    largest_group: int, window: int | None,
) -> Tensor:  # fmt: skip
    """softmax(q kᵀ / √d) v over the last `window` of the first `lengths[b]` tokens in slot `slots[b]`; [B, H, d].

    Products with float32 accumulation, statistics in float32; weights are rounded to v's dtype before their product.
    A sequence of length 0 gives zeros.

    Args:
        q: [B, H, d], d ≤ 256.
        key, value: [slots, KV heads, capacity, d].
        slots, lengths: [B] int32 or int64.
        query_bounds: [KV heads + 1] int32: KV head h serves queries query_bounds[h] to query_bounds[h + 1] − 1.
        largest_group: the most query heads that a KV head serves.
        window: how many last tokens are seen; None = all.
    """
    q, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, key, value))
    batch, heads, head_dim = q.shape
    capacity = key.shape[2]
    visible = capacity if window is None else min(window, capacity)
    block_d = max(16, next_power_of_two(head_dim))
    group = max(_MIN_QUERIES, next_power_of_two(largest_group))
    block_t = min(64, _BLOCK_BYTES // (block_d * key.element_size()))
    split_size = block_t * max(1, ceil_div(visible, block_t * _MAX_SPLITS))
    splits = ceil_div(visible, split_size)
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sums = torch.empty(batch, heads, splits, head_dim, dtype=torch.float32, device=q.device)
    statistics = torch.empty(2, batch, heads, splits, dtype=torch.float32, device=q.device)
    if output.numel():
        with on_device_of(q):
            if splits:
                _split_kernel[(batch, key.shape[1], splits)](
                    q, key, value, slots, lengths, query_bounds, sums, statistics[0], statistics[1],
                    q.stride(0), q.stride(1), *key.stride()[:3], *value.stride()[:3],
                    math.log2(math.e) / math.sqrt(head_dim), visible, split_size, heads, splits, head_dim,
                    GROUP=group, BLOCK_T=block_t, BLOCK_D=block_d,
                    num_stages=3 if group <= _MOST_QUERIES_STAGED else 2, **JOINT_ROUNDINGS,
                )  # fmt: skip
            _combine_kernel[(batch, heads)](
                sums, statistics[0], statistics[1], lengths, output, visible, split_size, splits, head_dim,
                SPLITS=next_power_of_two(max(1, splits)), BLOCK_D=block_d, **JOINT_ROUNDINGS,
            )  # fmt: skip
    return output


@triton.jit
def _split_kernel(
    q, key, value, slots, lengths, query_bounds, sums, maxima, totals,
    q_batch_stride, q_head_stride, key_slot_stride, key_head_stride, key_token_stride,
    value_slot_stride, value_head_stride, value_token_stride,
    scale, visible, split_size, num_heads, num_splits, head_dim,
    GROUP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The query heads of one KV head over one split of one sequence: Σ 2^(s − max) v, max and Σ 2^(s − max).

    s are scores in units of log 2, which is part of `scale`.
    """
    sequence, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + sequence).to(tl.int32)
    start = tl.maximum(length - visible, 0) + split * split_size
    stop = tl.minimum(start + split_size, length)
    if start < stop:
        slot = tl.load(slots + sequence).to(tl.int64)
        first_head, last_head = tl.load(query_bounds + kv_head), tl.load(query_bounds + kv_head + 1)
        heads = first_head + tl.arange(0, GROUP).to(tl.int64)
        channels = tl.arange(0, BLOCK_D)
        within = channels < head_dim
        served = (heads < last_head)[:, None] & within[None, :]
        queries = tl.load(
            q + sequence * q_batch_stride + heads[:, None] * q_head_stride + channels[None, :], mask=served, other=0
        )
        keys = key + slot * key_slot_stride + kv_head * key_head_stride
        values = value + slot * value_slot_stride + kv_head * value_head_stride
        maximum = tl.full([GROUP], float("-inf"), dtype=tl.float32)
        total = tl.zeros([GROUP], dtype=tl.float32)
        weighted = tl.zeros([GROUP, BLOCK_D], dtype=tl.float32)
        for token in range(start, stop, BLOCK_T):
            tokens = token + tl.arange(0, BLOCK_T).to(tl.int64)
            seen = tokens < stop
            k = tl.load(
                keys + tokens[None, :] * key_token_stride + channels[:, None],
                mask=within[:, None] & seen[None, :], other=0,
            )  # fmt: skip
            scores = tl.dot(queries, k, input_precision="ieee") * scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(maximum, tl.max(scores, axis=1))
            weights = tl.exp2(scores - higher[:, None])
            rescale = tl.exp2(maximum - higher)
            v = tl.load(
                values + tokens[:, None] * value_token_stride + channels[None, :],
                mask=seen[:, None] & within[None, :], other=0,
            )  # fmt: skip
            total = total * rescale + tl.sum(weights, axis=1)
            weighted = weighted * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            maximum = higher
        places = (sequence * num_heads + heads) * num_splits + split
        tl.store(sums + places[:, None] * head_dim + channels[None, :], weighted, mask=served)
        tl.store(maxima + places, maximum, mask=heads < last_head)
        tl.store(totals + places, total, mask=heads < last_head)


@triton.jit
def _combine_kernel(
    sums, maxima, totals, lengths, output, visible, split_size, num_splits, head_dim,
    SPLITS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One query head of one sequence: Σ_splits 2^(max_split − max) sums / Σ_splits 2^(max_split − max) totals."""
    sequence = tl.program_id(0).to(tl.int64)
    head = sequence * tl.num_programs(1) + tl.program_id(1)
    seen = tl.minimum(tl.load(lengths + sequence).to(tl.int32), visible)
    splits = tl.arange(0, SPLITS)
    used = splits * split_size < seen  # the others were not written
    maximum = tl.load(maxima + head * num_splits + splits, mask=used, other=_LOWEST)
    weights = tl.where(used, tl.exp2(maximum - tl.max(maximum, axis=0)), 0.0)
    total = tl.sum(weights * tl.load(totals + head * num_splits + splits, mask=used, other=0), axis=0)
    channels = tl.arange(0, BLOCK_D)
    within = channels < head_dim
    parts = tl.load(
        sums + (head * num_splits + splits)[:, None] * head_dim + channels[None, :],
        mask=used[:, None] & within[None, :], other=0,
    )  # fmt: skip
    result = tl.sum(parts * weights[:, None], axis=0) / tl.where(seen > 0, total, 1.0)
    tl.store(output + head * head_dim + channels, result.to(output.dtype.element_ty), mask=within)
