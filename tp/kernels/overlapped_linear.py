"""Linears joined to the collective beside them, under sequence parallelism (async tensor parallelism).

Where the GPUs of a group read each other's memory, the rows are multiplied piece by piece while the next piece is on
its way: torch's `fused_all_gather_matmul` and `fused_matmul_reduce_scatter` over symmetric memory (Wang et al. 2023,
"Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models"). Elsewhere one
follows the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional

from tp.choice import enabled
from tp.parallel.communicator import Communicator
from tp.parallel.group import TensorParallelGroup
from tp.parallel.symmetric_memory import SymmetricMemoryCommunicator

NAME = "overlapped_linear"
"""For `tp.choice`."""
LEAST_ROWS = 2048
"""Of the whole; fewer are multiplied in one piece. A choice that no measurement stands behind."""


def gathered_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: TensorParallelGroup, sizes: Sequence[int]
) -> Tensor:
    """y = concat_ranks x · Wᵀ + b: the all-gather of a column-parallel linear's input, joined to its matmul.

    Backward: dx = this rank's rows of Σ_ranks dy W; dW = dyᵀ concat_ranks x; db = Σ_rows dy. The gathered input is
    not kept but gathered again (Korthikanti et al. 2022, section 4.2.2), so that what is saved falls as 1/t.
    """
    if group.size == 1:
        return functional.linear(x, weight, bias)
    y: Tensor = _GatheredLinear.apply(x, weight, bias, group.communicator, tuple(sizes))  # type: ignore[no-untyped-call]
    return y


def scattered_linear(x: Tensor, weight: Tensor, group: TensorParallelGroup, sizes: Sequence[int]) -> Tensor:
    """y = this rank's rows of Σ_ranks x Wᵀ: a row-parallel linear's matmul, joined to its reduce-scatter.

    Backward: dx = concat_ranks dy · W; dW = (concat_ranks dy)ᵀ x.
    """
    y: Tensor = _ScatteredLinear.apply(x, weight, group.communicator, tuple(sizes))  # type: ignore[no-untyped-call]
    return y


def overlaps(communicator: Communicator, x: Tensor, sizes: Sequence[int]) -> TypeGuard[SymmetricMemoryCommunicator]:
    """Whether a matmul of `x` and the transfer of sum(sizes) rows run at the same time; alike on all ranks."""
    return (
        isinstance(communicator, SymmetricMemoryCommunicator)
        and enabled(NAME)
        and sum(sizes) >= LEAST_ROWS
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and communicator.overlaps
    )


def _all_gather_matmul(
    communicator: Communicator, x: Tensor, matrix: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """concat_ranks x, and concat_ranks x · matrix."""
    if overlaps(communicator, x, sizes):
        return communicator.all_gather_matmul(x, matrix, sizes)
    whole = communicator.all_gather(x, sizes)
    return whole, whole @ matrix


def _matmul_reduce_scatter(communicator: Communicator, x: Tensor, matrix: Tensor, sizes: Sequence[int]) -> Tensor:
    """This rank's rows of Σ_ranks x · matrix."""
    if overlaps(communicator, x, sizes):
        return communicator.matmul_reduce_scatter(x, matrix, sizes)
    return communicator.reduce_scatter(x @ matrix, sizes)


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, communicator: Communicator, sizes: tuple[int, ...]
    ) -> Tensor:
        ctx.communicator, ctx.sizes, ctx.has_bias = communicator, sizes, bias is not None
        ctx.save_for_backward(x, weight)
        if not overlaps(communicator, x, sizes):
            return functional.linear(communicator.all_gather(x, sizes), weight, bias)
        _, y = communicator.all_gather_matmul(x, weight.T, sizes)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        whole = ctx.communicator.all_gather(x, ctx.sizes)
        dx = _matmul_reduce_scatter(ctx.communicator, dy, weight, ctx.sizes)
        return dx, dy.T @ whole, dy.sum(0) if ctx.has_bias else None, None, None


class _ScatteredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, communicator: Communicator, sizes: tuple[int, ...]) -> Tensor:
        ctx.communicator, ctx.sizes = communicator, sizes
        ctx.save_for_backward(x, weight)
        return _matmul_reduce_scatter(communicator, x, weight.T, sizes)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        whole, dx = _all_gather_matmul(ctx.communicator, dy, weight, ctx.sizes)
        return dx, whole.T @ x, None, None
