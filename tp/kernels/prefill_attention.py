"""`causal_attention` in C++, for CPUs and without gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from tp.kernels.cache_attention import QueryGroups
from tp.native.library import ADDRESS, FLOAT, INTEGER, THREADS
from tp.native.operation import NativeOperation
from tp.parallel.partition import HeadRun

NAME = "prefill_attention"
"""For `tp.choice`."""
_NATIVE = NativeOperation(
    NAME, "tp_prefill_attention",
    *(ADDRESS, INTEGER, INTEGER) * 3, ADDRESS, INTEGER, FLOAT, ADDRESS, *(INTEGER,) * 5, THREADS,
)  # fmt: skip


def has_prefill_attention(q_HTd: Tensor, k_HSd: Tensor, v_HSd: Tensor) -> bool:
    """Whether the kernel serves them: on a CPU, without gradients, elements of a head side by side."""
    alike = all(x.is_cpu and x.dtype == q_HTd.dtype and x.stride(-1) == 1 for x in (q_HTd, k_HSd, v_HSd))
    return alike and not torch.is_grad_enabled() and _NATIVE.for_dtype(q_HTd.dtype) is not None


def prefill_attention(
    q_HTd: Tensor, k_HSd: Tensor, v_HSd: Tensor, runs: Sequence[HeadRun], window: int | None = None
) -> Tensor:
    """softmax(q kᵀ / √d) v of the last T of a sequence's S tokens; [H, T, d], its tokens side by side in memory.

    Scores, softmax and the weighted sum are float32, rounded once. Arguments as `causal_attention` takes them, for
    which `has_prefill_attention`.
    """
    native = _NATIVE.for_dtype(q_HTd.dtype)
    assert native is not None
    heads, queries, head_dim = q_HTd.shape
    kv_heads, keys, _ = k_HSd.shape
    out = q_HTd.new_empty(queries, heads, head_dim)
    strides = [(x.data_ptr(), x.stride(0), x.stride(1)) for x in (q_HTd, k_HSd, v_HSd)]
    native(
        *strides[0], *strides[1], *strides[2], _bounds(tuple(runs)).data_ptr(), window or 0, head_dim**-0.5,
        out.data_ptr(), heads, kv_heads, queries, keys, head_dim, torch.get_num_threads(),
    )  # fmt: skip
    return out.transpose(0, 1)


@functools.cache
def _bounds(runs: tuple[HeadRun, ...]) -> Tensor:
    """`QueryGroups.bounds`, kept, since C++ gets its address."""
    return QueryGroups.of_runs(runs, "cpu").bounds
