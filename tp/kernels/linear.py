"""y = x Wᵀ + b: torch's own, forms for CPUs that are faster with the same plain weights, and int8 weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tp.errors import AutogradError
from tp.kernels.int8_weight import Int8Weight
from tp.kernels.triton.use import uses_triton
from tp.kernels.upcast_matmul import faster_in_float32
from tp.native.library import ADDRESS, INTEGER, THREADS, NativeFunction
from tp.native.operands import address
from tp.native.operation import NativeOperation

FEW_ROWS = 32
"""Up to this many rows of x, the kernel that streams each weight once; above, a GEMM."""
UPCAST_ROWS = 512
"""Rows of the weight that are cast to float32 at a time: they stay in the last-level cache."""
_ARGUMENTS = (ADDRESS, INTEGER, *(ADDRESS,) * 4, *(INTEGER,) * 3, THREADS)
_LINEAR = NativeOperation("native_linear", "tp_linear", *_ARGUMENTS)
_LINEAR_INT8 = NativeOperation("native_linear", "tp_linear_int8", *_ARGUMENTS)
_GEMM = NativeOperation("native_gemm", "tp_gemm", *_ARGUMENTS)
_GEMM_INT8 = NativeOperation("native_gemm", "tp_gemm_int8", *_ARGUMENTS)


def linear(x: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None = None) -> Tensor:
    """y = x Wᵀ + b, accumulated in float32 (float64 for float64) and rounded once.

    On a CPU without gradients, C++ kernels serve few rows ("native_linear") and many rows of bfloat16
    ("native_gemm"); many rows of a dtype that the CPU has no matrix product for take float32's ("upcast_matmul"). On
    CUDA, Triton multiplies int8 weights ("int8_linear").

    Args:
        x: [..., in]
        weight: [out, in]
        bias: [out]

    Raises:
        AutogradError: int8 weights, and an x that wants a gradient.
    """
    if isinstance(weight, Int8Weight):
        return _int8_linear(x, weight, bias)
    if torch.is_grad_enabled():
        return functional.linear(x, weight, bias)
    native = _native(x, weight.dtype)
    if native is not None and _fits(x, weight, bias):
        return _native_linear(native, x, weight, None, bias)
    if not _has_few_rows(x) and faster_in_float32(x):
        return _upcast_linear(x, weight, None, bias)
    return functional.linear(x, weight, bias)


def _int8_linear(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        raise AutogradError("int8 weights have no gradients: run the model with gradients off, or load it again")
    native = _native(x, torch.int8)
    if native is not None and weight.scales.dtype == torch.float32 and _fits(x, weight.values, bias):
        return _native_linear(native, x, weight.values, weight.scales, bias)
    if not x.numel() or not uses_triton("int8_linear", x) or not _match(x, weight.values, bias):
        return _upcast_linear(x, weight.values, weight.scales, bias)
    from tp.kernels.triton.int8_linear import int8_linear

    return int8_linear(x, weight.values, weight.scales, bias)


def _has_few_rows(x: Tensor) -> bool:
    return x.numel() <= FEW_ROWS * x.shape[-1]


def _native(x: Tensor, weight_dtype: torch.dtype) -> NativeFunction | None:
    """The C++ kernel for x's rows, if there is one."""
    if not x.is_cpu or x.numel() == 0 or weight_dtype not in (x.dtype, torch.int8):
        return None
    int8 = weight_dtype == torch.int8
    if _has_few_rows(x):
        return (_LINEAR_INT8 if int8 else _LINEAR).for_dtype(x.dtype)
    if x.shape[-1] % 2:
        return None  # the kernel takes columns in pairs
    return (_GEMM_INT8 if int8 else _GEMM).for_dtype(x.dtype)


def _match(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a kernel may take their addresses; what torch would refuse is left for torch to refuse."""
    device = x.get_device()
    return (
        weight.get_device() == device
        and x.shape[-1] == weight.shape[-1]
        and (bias is None or (bias.get_device() == device and bias.dtype == x.dtype and bias.shape == weight.shape[:1]))
    )


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """`_match` for the C++ kernel, which knows no strides."""
    return _match(x, weight, bias) and weight.is_contiguous() and (bias is None or bias.is_contiguous())


def _native_linear(
    native: NativeFunction, x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None
) -> Tensor:
    out_features, in_features = weight.shape
    x_rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, in_features).contiguous()
    y = x.new_empty(x_rows.shape[0], out_features)
    native(
        x_rows.data_ptr(), x_rows.stride(0), weight.data_ptr(), address(scales), address(bias), y.data_ptr(),
        x_rows.shape[0], in_features, out_features, torch.get_num_threads(),
    )  # fmt: skip
    return y if x.dim() == 2 else y.view(*x.shape[:-1], out_features)


def _upcast_linear(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    """The weights pass through a block of float32 that stays in the cache: W_block → float32, x W_blockᵀ, rounded."""
    out_features, in_features = weight.shape
    wide_x = x.reshape(x.shape[:-1].numel(), in_features).float()  # columns may be none
    block = wide_x.new_empty(min(UPCAST_ROWS, out_features), in_features)
    y = x.new_empty(wide_x.shape[0], out_features)
    for start in range(0, out_features, UPCAST_ROWS):
        rows = slice(start, min(start + UPCAST_ROWS, out_features))
        product = wide_x @ block[: rows.stop - start].copy_(weight[rows]).t()
        if scales is not None:
            product *= scales[rows]
        if bias is not None:
            product += bias[rows]
        y[:, rows] = product
    return y.view(*x.shape[:-1], out_features)
