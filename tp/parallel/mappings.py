"""The conjugate pairs: collectives as differentiable functions of an explicit group.

| function | forward | backward |
|---|---|---|
| copy_to_tensor_parallel_region | identity | all-reduce |
| reduce_from_tensor_parallel_region | all-reduce | identity |
| gather_from_sequence_parallel_region | all-gather of rows | reduce-scatter |
| reduce_scatter_to_sequence_parallel_region | reduce-scatter of rows | all-gather |
| split_to_region | this rank's rows | all-gather |
| gather_from_region | all-gather of rows | this rank's rows |
| gather_last_dim_from_region | all-gather of columns | this rank's columns |

The two all-gathers differ in who reads the result: a column-parallel linear leaves a partial gradient on every
rank (reduce-scatter); what is consumed alike everywhere already has the whole gradient (take one's own rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tp.parallel.group import TensorParallelGroup


def copy_to_tensor_parallel_region(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """y = x; dx = Σ_ranks dy. Enters a region where every rank computes with its own weights."""
    return x if group.size == 1 else _CopyTo.apply(x, group)


def reduce_from_tensor_parallel_region(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """y = Σ_ranks x; dx = dy. Leaves the region: partial sums become the complete value on every rank."""
    return x if group.size == 1 else _ReduceFrom.apply(x, group)


def gather_from_sequence_parallel_region(x: Tensor, group: TensorParallelGroup, sizes: Sequence[int]) -> Tensor:
    """y = concat_ranks x along dim 0; dx = this rank's rows of Σ_ranks dy. Feeds a column-parallel linear."""
    return x if group.size == 1 else _GatherReduceScatter.apply(x, group, tuple(sizes))


def reduce_scatter_to_sequence_parallel_region(x: Tensor, group: TensorParallelGroup, sizes: Sequence[int]) -> Tensor:
    """y = this rank's rows of Σ_ranks x; dx = concat_ranks dy. Partial sums become this rank's tokens."""
    return x if group.size == 1 else _ReduceScatter.apply(x, group, tuple(sizes))


def split_to_region(x: Tensor, group: TensorParallelGroup, sizes: Sequence[int]) -> Tensor:
    """y = this rank's rows of a replicated x; dx = concat_ranks dy."""
    return x if group.size == 1 else _Split.apply(x, group, tuple(sizes))


def gather_from_region(x: Tensor, group: TensorParallelGroup, sizes: Sequence[int]) -> Tensor:
    """y = concat_ranks x along dim 0, consumed alike on every rank; dx = this rank's rows of dy."""
    return x if group.size == 1 else _GatherSplit.apply(x, group, tuple(sizes))


def gather_last_dim_from_region(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """y = concat_ranks x along the last dim (equal sizes), consumed alike on every rank; dx = this rank's columns."""
    if group.size == 1:
        return x
    columns_first = x.movedim(-1, 0)
    gathered = gather_from_region(columns_first, group, [columns_first.shape[0]] * group.size)
    return gathered.movedim(0, -1)


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorParallelGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.group.communicator.all_reduce(dy), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorParallelGroup) -> Tensor:
        return group.communicator.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _GatherReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorParallelGroup, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return group.communicator.all_gather(x, sizes)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.communicator.reduce_scatter(dy, ctx.sizes), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorParallelGroup, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return group.communicator.reduce_scatter(x, sizes)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.communicator.all_gather(dy, ctx.sizes), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorParallelGroup, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        own_rows: Tensor = x.split(list(sizes))[group.rank]
        return own_rows.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.communicator.all_gather(dy, ctx.sizes), None, None


class _GatherSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorParallelGroup, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return group.communicator.all_gather(x, sizes)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        own_rows: Tensor = dy.split(list(ctx.sizes))[ctx.group.rank]
        return own_rows.contiguous(), None, None
