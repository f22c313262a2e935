"""What the residual stream does with a partial sum: Σ over ranks, + bias, + residual, RMSNorm, as one operation.

Rounding points, on every path: u = Σ_ranks partial (float32, in rank order where we own the sum); u + bias;
residual + u; the normed value; its product with the weight. The state is bitwise the same on every path of a
communicator; the norm may differ by the order in which its mean of squares is summed, see
`tp.kernels.native_rms_norm.native_rms_norm`. (NCCL's sums, where a tensor is too large for symmetric memory, are its
own.)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from tp.choice import enabled
from tp.kernels.native_rms_norm import native_add_rms_norm
from tp.kernels.rms_norm import plain_rms_norm
from tp.kernels.triton.use import uses_row_kernel
from tp.parallel.communicator import Communicator
from tp.parallel.shared_memory import SharedMemoryCommunicator
from tp.parallel.symmetric_memory import SymmetricMemoryCommunicator

NAME = "reduce_add_rms_norm"
"""For `tp.choice`: the collectives that end in a norm."""


def reduce_add_rms_norm(
    communicator: Communicator,
    partial: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(state, normed): state = residual + (Σ_ranks partial + bias), normed = RMSNorm(state) · weight, on every rank.

    One collective, counted as an all-reduce of `partial`. No gradients: to be called with grad mode off. The
    operands are never changed; without bias and residual, the state of a group of one may be `partial` itself.

    Args:
        partial: [N, D], this rank's addend.
        bias: [D], added once.
        residual: [N, D], equal on all ranks.
        weight: [D], any floating dtype.
    """
    assert not torch.is_grad_enabled(), "reduce_add_rms_norm has no backward: call it with gradients off"
    if _fuses_in_shared_memory(communicator, partial, bias, residual, weight, partial.shape[0]):
        return communicator.reduce_add_rms_norm(partial, bias, residual, weight, eps)
    if _fuses_in_symmetric_memory(communicator, partial, bias, residual, weight):
        from tp.kernels.triton.symmetric_memory import one_shot, two_shot

        if communicator.in_one_shot(partial):
            rows = range(len(partial))
            finish = functools.partial(one_shot, rows=rows, bias=bias, residual=residual, weight=weight, eps=eps)
        else:
            finish = functools.partial(two_shot, bias=bias, residual=residual, weight=weight, eps=eps)
        return communicator.with_addends(partial, finish)
    return add_rms_norm(communicator.all_reduce(partial), bias, residual, weight, eps)


def reduce_scatter_add_rms_norm(
    communicator: Communicator,
    partial: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """`reduce_add_rms_norm` of this rank's rows only, for a stream that is sharded by token.

    Args:
        partial: [sum(sizes), D], this rank's addend of all rows.
        residual: [sizes[rank], D].
        sizes: rows of every rank, in rank order; may contain zeros.
    """
    assert not torch.is_grad_enabled(), "reduce_scatter_add_rms_norm has no backward: call it with gradients off"
    if _fuses_in_shared_memory(communicator, partial, bias, residual, weight, sizes[communicator.rank]):
        return communicator.reduce_scatter_add_rms_norm(partial, bias, residual, weight, eps, sizes)
    if _fuses_in_symmetric_memory(communicator, partial, bias, residual, weight):
        from tp.kernels.triton.symmetric_memory import one_shot

        first = sum(sizes[: communicator.rank])
        rows = range(first, first + sizes[communicator.rank])
        finish = functools.partial(one_shot, rows=rows, bias=bias, residual=residual, weight=weight, eps=eps)
        return communicator.with_addends(partial, finish)
    return add_rms_norm(communicator.reduce_scatter(partial, sizes), bias, residual, weight, eps)


def add_rms_norm(
    update: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The same without a group: state = residual + (update + bias), and its norm; on CUDA one Triton kernel."""
    if (fused := native_add_rms_norm(update, bias, residual, weight, eps)) is not None:
        return fused
    if uses_row_kernel("fused_add_rms_norm", update) and _alike(update, bias, residual):
        from tp.kernels.triton.fused_add_rms_norm import add_rms_norm as triton_add_rms_norm

        return triton_add_rms_norm(update, bias, residual, weight, eps)
    return plain_add_rms_norm(update, bias, residual, weight, eps)


def plain_add_rms_norm(
    update: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` in torch operations."""
    if bias is not None:
        update = update + bias
    state = update if residual is None else residual + update
    return state, plain_rms_norm(state, weight, eps)[0]


def _fuses_in_shared_memory(
    communicator: Communicator,
    partial: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    rows: int,
) -> TypeGuard[SharedMemoryCommunicator]:
    return (
        isinstance(communicator, SharedMemoryCommunicator)
        and enabled(NAME)
        and communicator.supports_add_rms_norm(partial, bias, residual, weight, rows)
    )


def _fuses_in_symmetric_memory(
    communicator: Communicator, partial: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor
) -> TypeGuard[SymmetricMemoryCommunicator]:
    return (
        isinstance(communicator, SymmetricMemoryCommunicator)
        and communicator.takes(partial)
        and weight.shape == partial.shape[1:]
        and uses_row_kernel(NAME, partial)
        and _alike(partial, bias, residual)
    )


def _alike(update: Tensor, bias: Tensor | None, residual: Tensor | None) -> bool:
    return all(operand is None or operand.dtype == update.dtype for operand in (bias, residual))
