"""RMSNorm in C++ for CPUs, alone and after a residual add: one pass to read and add, one to normalise."""

from __future__ import annotations

import torch
from torch import Tensor

from tp.native.library import ADDRESS, FLOAT, INTEGER, THREADS
from tp.native.operands import address, contiguous, weight_for
from tp.native.operation import NativeOperation

NAME = "native_rms_norm"
"""For `tp.choice`."""
_RMS_NORM = NativeOperation(
    NAME, "tp_rms_norm", ADDRESS, INTEGER, INTEGER, ADDRESS, FLOAT, ADDRESS, INTEGER, INTEGER, THREADS
)
_ADD_RMS_NORM = NativeOperation(
    NAME, "tp_add_rms_norm",
    ADDRESS, INTEGER, ADDRESS, ADDRESS, ADDRESS, FLOAT, ADDRESS, ADDRESS, INTEGER, INTEGER, THREADS,
)  # fmt: skip
_FEWEST_ELEMENTS_A_THREAD = 16384
"""Below, starting a thread takes longer than its work."""


def native_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """`tp.kernels.rms_norm.rms_norm` without gradients; None where there is no C++ for these operands.

    Rounded where that one rounds. Its mean of squares is summed in another order: the result is within 8 units in the
    last place of float32, and 2 of bfloat16, where fewer than one in a hundred differs at all.

    Args:
        x: [..., D] float32 or bfloat16 on the CPU; rows may be apart, elements of a row not.
        weight: [D], any floating dtype.
    """
    kernel = _RMS_NORM.for_dtype(x.dtype) if x.is_cpu and x.dim() and x.shape[-1] else None
    if kernel is None or weight.shape != x.shape[-1:]:
        return None
    columns = x.shape[-1]
    if x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == columns:  # heads side by side, tokens apart
        rows, parts = x, x.shape[1]
    else:
        rows, parts = _rows(x), 1
    weight = weight_for(x, weight)
    y = x.new_empty(x.shape)
    kernel(
        rows.data_ptr(), rows.stride(0), parts, weight.data_ptr(), eps, y.data_ptr(), rows.shape[0] * parts, columns,
        _threads(rows.numel()),
    )  # fmt: skip
    return y


def native_add_rms_norm(
    update: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor] | None:
    """(r, RMSNorm(r) · w) with r = residual + (update + bias), each sum rounded; None where there is no C++ for it.

    r is bitwise what torch gives; the norm is as in `native_rms_norm`. Nothing is written to the operands.

    Args:
        update: [N, D] float32 or bfloat16 on the CPU.
        bias: [D], of update's dtype. residual: [N, D], of update's dtype.
        weight: [D], any floating dtype.
    """
    kernel = _ADD_RMS_NORM.for_dtype(update.dtype) if update.is_cpu and update.dim() == 2 and update.shape[1] else None
    if kernel is None or weight.shape != update.shape[1:] or not _fit(update, bias, residual):
        return None
    rows, bias, residual = update.contiguous(), contiguous(bias), contiguous(residual)
    weight = weight_for(update, weight)
    state, normed = torch.empty_like(rows), torch.empty_like(rows)
    kernel(
        rows.data_ptr(), rows.shape[1], address(bias), address(residual), weight.data_ptr(), eps, state.data_ptr(),
        normed.data_ptr(), rows.shape[0], rows.shape[1], _threads(rows.numel()),
    )  # fmt: skip
    return state, normed


def _fit(update: Tensor, bias: Tensor | None, residual: Tensor | None) -> bool:
    return (bias is None or (bias.shape == update.shape[1:] and bias.dtype == update.dtype)) and (
        residual is None or (residual.shape == update.shape and residual.dtype == update.dtype)
    )


def _rows(x: Tensor) -> Tensor:
    """[rows, D], each row's elements side by side."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _threads(elements: int) -> int:
    return max(1, min(torch.get_num_threads(), elements // _FEWEST_ELEMENTS_A_THREAD))
