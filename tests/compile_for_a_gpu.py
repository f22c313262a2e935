"""A program: compiles the Triton kernels to machine code of a GPU (sm_90) on a machine that has none, and runs nothing.

Prints a line for each kernel: its name, and the bytes of its code and of the shared memory of a program.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import jit
from triton.runtime.driver import driver

from tp.kernels.cache_attention import QueryGroups
from tp.kernels.triton import cross_entropy, fused_add_rms_norm, rms_norm, rotary, silu_and_mul, symmetric_memory
from tp.kernels.triton.cache_attention import attend_to_cache
from tp.kernels.triton.int8_linear import int8_linear
from tp.parallel.partition import uniform_runs
from tp.parallel.symmetric_memory import Addends

DTYPE = torch.bfloat16
WIDTH = 896
ROWS = 8


class AbsentGpu:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def install() -> None:
    """Makes every launch of this process a compilation."""
    run = jit.JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = run(self, *arguments, grid=grid, warmup=True, **options)
        code, shared = len(compiled.asm["cubin"]), compiled.metadata.shared
        print(self.fn.__module__.rpartition(".")[2], self.fn.__name__, code, shared)
        return compiled

    driver.set_active(AbsentGpu())
    jit.JITFunction.run = compile_only


def random(*shape: int) -> Tensor:
    return torch.randn(*shape).to(DTYPE)


def norms() -> None:
    x, residual, weight = random(ROWS, WIDTH), random(ROWS, WIDTH), random(WIDTH)
    rms_norm.rms_norm_forward(x, weight, 1e-5)
    rms_norm.rms_norm_backward(x, x, weight, torch.ones(ROWS, 1))
    fused_add_rms_norm.add_rms_norm_in_place(x, residual, weight, 1e-5)
    fused_add_rms_norm.add_rms_norm(x, weight, None, weight, 1e-5)
    tensors = [random(ROWS, WIDTH) for _ in range(3)]
    addends = Addends(tensors, 0, torch.tensor([tensor.data_ptr() for tensor in tensors]), lambda: None)
    for bias, base in ((weight, residual), (None, None)):
        symmetric_memory.one_shot(addends, range(ROWS), bias, base, weight, 1e-5)
        symmetric_memory.two_shot(addends, bias, base, weight, 1e-5)


def int8_linears() -> None:
    """Of one row, of all shapes of tiles, and of columns that programs share."""
    for dtype in (DTYPE, torch.float32):
        for rows, in_features in ((1, WIDTH), (ROWS, 9000), (40, WIDTH), (100, WIDTH)):
            values, scales = torch.ones(WIDTH, in_features, dtype=torch.int8), torch.ones(WIDTH)
            int8_linear(random(rows, in_features).to(dtype), values, scales, random(WIDTH).to(dtype))


def others() -> None:
    gate_up = random(ROWS, 2 * WIDTH)
    silu_and_mul.silu_and_mul_forward(gate_up)
    silu_and_mul.silu_and_mul_backward(gate_up[:, :WIDTH], gate_up)
    q, k, cos = random(ROWS, 14, 64), random(ROWS, 2, 64), random(ROWS, 1, 64)
    rotary.rotate(q, k, cos, cos)
    logits, labels, ones = random(ROWS, 5000), torch.arange(ROWS), torch.ones(ROWS)
    cross_entropy.shard_statistics(logits, labels, 4999)
    cross_entropy.shard_gradient(logits, labels, 4999, ones, ones, ones.bool(), 1.0, 0.0)


def attention() -> None:
    """What needs most shared memory in each dtype: wide heads, and many for each KV head."""
    indices = torch.arange(ROWS)
    for dtype, heads, head_dim in (
        (DTYPE, 14, 64), (DTYPE, 64, 256), (DTYPE, 128, 256), (torch.float32, 14, 128), (torch.float32, 128, 128),
        (torch.float32, 64, 256),
    ):  # fmt: skip
        groups = QueryGroups.of_runs(uniform_runs(heads, 2, 1, 0), "cpu")
        q, cache = random(ROWS, heads, head_dim).to(dtype), random(ROWS, 2, 128, head_dim).to(dtype)
        attend_to_cache(q, cache, cache, indices, indices, groups.bounds, max(groups.sizes), None)


if __name__ == "__main__":
    install()
    norms()
    int8_linears()
    attention()
    others()
