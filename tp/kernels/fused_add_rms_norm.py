"""The residual add and the RMSNorm after it in one operation, in place."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tp.errors import AutogradError, LayoutError
from tp.kernels.rms_norm import plain_rms_norm
from tp.kernels.triton.rows import writable_rows
from tp.kernels.triton.use import uses_row_kernel


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """residual ← cast(residual + x), then x ← RMSNorm(residual) · w as `rms_norm` rounds it; both in place.

    On CUDA one Triton kernel, which reads and writes each element once.

    Args:
        x: [..., D], what a sublayer adds; holds the norm afterwards.
        residual: like x, sharing no memory with it; any strides.
        weight: [D], any floating dtype.

    Raises:
        AutogradError: gradients are recorded and an operand wants one: its old value would be gone.
        LayoutError: x and residual differ in shape or dtype, or are one tensor.
    """
    if torch.is_grad_enabled() and (x.requires_grad or residual.requires_grad or weight.requires_grad):
        raise AutogradError("fused_add_rms_norm writes over its operands, of which one wants a gradient: "
                            "call it under torch.no_grad(), or add and norm apart")  # fmt: skip
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise LayoutError(f"fused_add_rms_norm of {x.dtype} {tuple(x.shape)} and a residual of "
                          f"{residual.dtype} {tuple(residual.shape)}: they are one shape and dtype")  # fmt: skip
    if x.data_ptr() == residual.data_ptr() and x.numel():
        raise LayoutError("fused_add_rms_norm of a tensor and itself: x and residual get different values")
    if uses_row_kernel("fused_add_rms_norm", x):
        x_rows, residual_rows = writable_rows(x), writable_rows(residual)
        if x_rows is not None and residual_rows is not None:
            _triton_add_rms_norm(x_rows, residual_rows, weight, eps)
            return
    plain_fused_add_rms_norm(x, residual, weight, eps)


def plain_fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """`fused_add_rms_norm` in torch operations."""
    residual += x
    x.copy_(plain_rms_norm(residual, weight, eps)[0])


def _triton_add_rms_norm(x_rows: Tensor, residual_rows: Tensor, weight: Tensor, eps: float) -> None:
    from tp.kernels.triton.fused_add_rms_norm import add_rms_norm_in_place

    add_rms_norm_in_place(x_rows, residual_rows, weight, eps)
    increment_version([x_rows, residual_rows])  # autograd sees no writes through pointers
