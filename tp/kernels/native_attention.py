"""`causal_attention` in C++, for CPUs and without gradients."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tp.choice import enabled
from tp.native.library import ADDRESS, FLOAT, INTEGER, THREADS, native_function
from tp.parallel.partition import HeadRun

NATIVE = {torch.bfloat16: "tp_prefill_attention_bfloat16", torch.float32: "tp_prefill_attention_float32"}
NAME = "prefill_attention"
"""For `tp.choice`."""


def has_native_attention(q_HTd: Tensor, k_HSd: Tensor, v_HSd: Tensor) -> bool:
    """Whether the kernel serves them: on a CPU, without gradients, elements of a head side by side."""
    alike = all(x.is_cpu and x.dtype == q_HTd.dtype and x.stride(-1) == 1 for x in (q_HTd, k_HSd, v_HSd))
    return alike and not torch.is_grad_enabled() and _native(q_HTd.dtype) is not None


def native_causal_attention(
    q_HTd: Tensor, k_HSd: Tensor, v_HSd: Tensor, runs: Sequence[HeadRun], window: int | None = None
) -> Tensor:
    """softmax(q kᵀ / √d) v of the last T of a sequence's S tokens; [H, T, d], its tokens side by side in memory.

    Scores, softmax and the weighted sum are float32, rounded once. Arguments as `causal_attention` takes them.
    """
    native = _native(q_HTd.dtype)
    assert native is not None
    heads, queries, head_dim = q_HTd.shape
    kv_heads, keys, _ = k_HSd.shape
    out = q_HTd.new_empty(queries, heads, head_dim)
    strides = [(x.data_ptr(), x.stride(0), x.stride(1)) for x in (q_HTd, k_HSd, v_HSd)]
    native(
        *strides[0], *strides[1], *strides[2], _bounds(tuple(runs)), window or 0, head_dim**-0.5,
        out.data_ptr(), heads, kv_heads, queries, keys, head_dim, torch.get_num_threads(),
    )  # fmt: skip
    return out.transpose(0, 1)


@functools.cache
def _bounds(runs: tuple[HeadRun, ...]) -> Any:
    """int32 [KV heads + 1]: KV head h serves the query heads bounds[h] to bounds[h + 1] − 1."""
    bounds = [0]
    for run in runs:
        bounds += [bounds[-1] + (index + 1) * run.queries_per_kv_head for index in range(len(run.kv_heads))]
    return (ctypes.c_int32 * len(bounds))(*bounds)


@functools.cache
def _native(dtype: torch.dtype) -> Callable[..., Any] | None:
    if dtype not in NATIVE or not enabled(NAME):
        return None
    of_tensor = (ADDRESS, INTEGER, INTEGER)
    return native_function(
        NATIVE[dtype], *of_tensor * 3, ADDRESS, INTEGER, FLOAT, ADDRESS, *(INTEGER,) * 5, THREADS
    )  # fmt: skip
