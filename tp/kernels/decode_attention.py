"""A decode step's attention: rotary, append to the cache, and attention to it, for one new token of each sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from tp.choice import enabled
from tp.kernels.cache_attention import QueryGroups, cache_attention
from tp.kernels.rotary import rotate_queries_and_keys
from tp.native.library import ADDRESS, FLOAT, INTEGER, THREADS, NativeFunction
from tp.native.operation import NativeOperation

NAME = "decode_attention"
"""For `tp.choice`."""
_NATIVE = NativeOperation(
    NAME, "tp_decode_attention",
    *(ADDRESS, INTEGER) * 3,
    *(ADDRESS,) * 4, INTEGER, INTEGER,
    *(ADDRESS,) * 3, INTEGER, FLOAT,
    ADDRESS, *(INTEGER,) * 4, THREADS,
)  # fmt: skip


def has_decode_attention(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether decode steps have a kernel of their own here; else `causal_attention` serves each sequence."""
    if device.type == "cuda":
        return enabled(NAME) and enabled("cache_attention")
    return device.type == "cpu" and _NATIVE.for_dtype(dtype) is not None


def decode_attention(
    q_BHd: Tensor,
    k_BHd: Tensor,
    v_BHd: Tensor,
    rotary: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
    starts: Tensor,
    groups: QueryGroups,
    window: int | None = None,
) -> Tensor:
    """softmax(rotary(q) Kᵀ / √d) V, this token's rotary(k) and v appended to K and V first; [B, H, d].

    The rounding points of rotary are `apply_rotary`'s; scores, softmax and the weighted sum are float32. No backward.

    Args:
        q_BHd, k_BHd, v_BHd: one token of each of B sequences, before rotary.
        rotary: cos and sin, [B, 1, d], in q's dtype.
        cache: keys and values, [slots, KV heads, capacity, d]; changed in place.
        slots: [B] int64, each sequence's row of the cache.
        starts: [B] int64, tokens of each sequence that are in the cache; where the new one goes.
        groups: the query heads of each KV head.
        window: how many last positions (the own included) a token sees; None = all.
    """
    native = _NATIVE.for_dtype(q_BHd.dtype) if q_BHd.is_cpu else None
    alike = all(part.dtype == q_BHd.dtype and part.stride() == cache[0].stride() for part in cache)
    if native is not None and alike:
        return _native_attention(native, q_BHd, k_BHd, v_BHd, rotary, cache, slots, starts, groups, window)
    keys, values = cache
    q_BHd, k_BHd = rotate_queries_and_keys(q_BHd, k_BHd, *rotary)
    keys[slots, :, starts] = k_BHd
    values[slots, :, starts] = v_BHd
    return cache_attention(q_BHd, keys, values, slots, starts + 1, groups, window)


def _native_attention(
    native: NativeFunction,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
    starts: Tensor,
    groups: QueryGroups,
    window: int | None,
) -> Tensor:
    cosine, sine = rotary
    keys, values = cache
    batch, heads, head_dim = q.shape
    out = q.new_empty(batch, heads, head_dim)
    native(
        q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0),
        cosine.data_ptr(), sine.data_ptr(), keys.data_ptr(), values.data_ptr(), keys.stride(0), keys.stride(1),
        slots.data_ptr(), starts.data_ptr(), groups.bounds.data_ptr(), window or 0, head_dim**-0.5,
        out.data_ptr(), batch, heads, k.shape[1], head_dim, torch.get_num_threads(),
    )  # fmt: skip
    return out
