"""The C++ kernels that an operation has, seen by what it leaves on a tape; and what switches them off."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tp import choice
from tp.kernels.argmax_and_sum_exp import argmax_and_sum_exp
from tp.kernels.attention import causal_attention
from tp.kernels.cache_attention import QueryGroups
from tp.kernels.decode_attention import decode_attention
from tp.kernels.embedding_lookup import embedding_lookup
from tp.kernels.gated_activation import silu_and_mul
from tp.kernels.int8_weight import Int8Weight
from tp.kernels.linear import linear
from tp.kernels.reduce_add_rms_norm import add_rms_norm
from tp.kernels.rms_norm import rms_norm
from tp.kernels.rotary import cos_and_sin
from tp.native import operation
from tp.native.operation import NativeOperation
from tp.native.tape import Tape
from tp.parallel.partition import uniform_runs

RUNS = uniform_runs(1, 1, 1, 0)
USES: dict[str, tuple[str, Callable[[torch.dtype], object]]] = {
    "few rows": ("native_linear", lambda dtype: linear(ones(dtype, 2, 8), ones(dtype, 4, 8))),
    "few rows, int8": ("native_linear", lambda dtype: linear(ones(dtype, 2, 8), int8(dtype))),
    "many rows": ("native_gemm", lambda dtype: linear(ones(dtype, 40, 8), ones(dtype, 4, 8))),
    "many rows, int8": ("native_gemm", lambda dtype: linear(ones(dtype, 40, 8), int8(dtype))),
    "rows": ("embedding_lookup", lambda dtype: embedding_lookup(ones(dtype, 4, 8), ZERO)),
    "rows, int8": ("embedding_lookup", lambda dtype: embedding_lookup(int8(dtype), ZERO)),
    "norm": ("native_rms_norm", lambda dtype: rms_norm(ones(dtype, 2, 8), torch.ones(8), 1e-5)),
    "add, norm": ("native_rms_norm", lambda dtype: add_rms_norm(ones(dtype, 2, 8), None, None, torch.ones(8), 1e-5)),
    "silu and mul": ("silu_and_mul", lambda dtype: silu_and_mul(ones(dtype, 2, 8))),
    "cos and sin": ("rotary", lambda dtype: cos_and_sin(ZERO, torch.ones(4), 1.0, dtype)),
    "decode": ("decode_attention", lambda dtype: decode(ones(dtype, 1, 1, 8), ones(dtype, 1, 1, 4, 8))),
    "prefill": ("prefill_attention", lambda dtype: causal_attention(*[ones(dtype, 1, 3, 8)] * 3, RUNS)),
    "argmax": ("argmax_and_sum_exp", lambda dtype: argmax_and_sum_exp(ones(dtype, 2, 8))),
}
ZERO = torch.tensor([0])


def ones(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    return torch.ones(sizes, dtype=dtype)


def int8(dtype: torch.dtype) -> Int8Weight:
    return Int8Weight(ones(dtype, 4, 8), torch.ones(4))


def decode(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return decode_attention(q, q, q, (q, q), (keys, keys.clone()), ZERO, ZERO, QueryGroups.of_runs(RUNS, "cpu"))


def runs_in_cpp(use: Callable[[torch.dtype], object], dtype: torch.dtype) -> bool:
    tape = Tape()
    with tape.recording():
        use(dtype)
    return len(tape) > 0


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", USES)
def test_a_kernel_is_switched_off_and_on_by_its_name_at_any_time(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_disabled", frozenset())
    switch, use = USES[name]
    exists = switch != "native_gemm" or (dtype == torch.bfloat16 and torch.cpu._is_avx2_supported())
    assert runs_in_cpp(use, dtype) == exists
    for off in (switch, "native"):
        choice.disable(off)
        assert not runs_in_cpp(use, dtype)
    choice.disable(",".join(set(choice.OPERATIONS) - {switch, "native"}))
    assert runs_in_cpp(use, dtype) == exists


def test_where_there_is_no_function_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NativeOperation("rotary", "tp_cos_and_sin").for_dtype(torch.float32) is not None
    assert NativeOperation("rotary", "tp_cos_and_sin").for_dtype(torch.float16) is None
    monkeypatch.setattr(operation, "library", lambda: None)
    assert NativeOperation("rotary", "tp_cos_and_sin").for_dtype(torch.float32) is None
