"""Residual add and RMSNorm in one launch, in Triton: each row is read once and stays in registers."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp.kernels.triton.norm_of_rows import plus_bias, settle, tile_rows
from tp.kernels.triton.rows import SEPARATE_ROUNDINGS, Tiling, on_device_of, readable_rows


def add_rms_norm_in_place(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """residual ← cast(x + residual); x ← RMSNorm(residual) · cast(w), rounded as in `rms_norm`.

    Args:
        x, residual: [rows, D] of one dtype, the last dim contiguous, D ≤ 16384. They share no memory.
        weight: [D], any floating dtype.
    """
    _launch(x, None, residual, weight, eps, residual, x)


def add_rms_norm(
    update: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """state = cast(residual + cast(update + bias)) and RMSNorm(state) · cast(w); the operands are only read.

    Args:
        update, residual: [rows, D] of one dtype, D ≤ 16384.
        bias: [D]. weight: [D], any floating dtype.
    """
    state, normed = (torch.empty(update.shape, dtype=update.dtype, device=update.device) for _ in range(2))
    base = None if residual is None else readable_rows(residual)
    _launch(readable_rows(update), None if bias is None else bias.contiguous(), base, weight, eps, state, normed)
    return state, normed


def _launch(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor, eps: float, state: Tensor, normed: Tensor
) -> None:
    num_rows, width = x.shape
    tiling = Tiling.of_width(width)
    if num_rows:
        with on_device_of(x):
            _kernel[(tiling.programs(num_rows),)](
                x, bias, residual, weight.contiguous(), state, normed,
                x.stride(0), 0 if residual is None else residual.stride(0), state.stride(0), normed.stride(0),
                num_rows, width, eps,
                ROWS=tiling.rows, BLOCK=tiling.block, num_warps=tiling.num_warps, **SEPARATE_ROUNDINGS,
            )  # fmt: skip


@triton.jit
def _kernel(
    x, bias, residual, weight, state, normed,
    x_stride, residual_stride, state_stride, normed_stride, num_rows, width, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tile_rows(ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    update = plus_bias(
        tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0), bias, columns, width
    )
    settle(
        update, residual, rows[:, None] * residual_stride + columns[None, :], weight,
        state + rows[:, None] * state_stride + columns[None, :],
        normed + rows[:, None] * normed_stride + columns[None, :],
        inside, columns, width, eps,
    )  # fmt: skip
