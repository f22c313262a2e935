"""Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tp.kernels.native_rms_norm import native_rms_norm
from tp.kernels.statistics import statistics_dtype
from tp.kernels.triton.use import uses_row_kernel


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = n · w with n = cast(x · r), r = rsqrt(mean(x²) + eps), over the last dim.

    Statistics in float32 (float64 for float64); the normed value is rounded to x's dtype before the product
    with the weight, itself in x's dtype, as transformers does. `torch.nn.functional.rms_norm` rounds elsewhere.

    Backward, with dn = dy · w: dx = r · (dn − h · mean(dn · h)) where h = x · r; dw = Σ_rows dy · n. Only x and r
    are saved. On CUDA both are Triton kernels, whose r is within 4 units in the last place of the plain one.

    Args:
        x: [..., D]; never changed.
        weight: [D], any floating dtype.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        y: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
        return y
    if (normed := native_rms_norm(x, weight, eps)) is not None:
        return normed
    return _forward(x, weight, eps)[0]


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y and r of `rms_norm` in torch operations; r is [..., 1]."""
    wide = x.to(statistics_dtype(x.dtype))
    reciprocal = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * reciprocal).to(x.dtype) * weight.to(x.dtype), reciprocal


def plain_rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, reciprocal: Tensor) -> tuple[Tensor, Tensor]:
    """dx and dw of `rms_norm` in torch operations."""
    h = x.to(reciprocal.dtype) * reciprocal
    d_weight = (dy.to(h.dtype) * h.to(x.dtype)).reshape(-1, x.shape[-1]).sum(0)
    d_normed = (dy * weight.to(x.dtype)).to(reciprocal.dtype)
    dx = reciprocal * (d_normed - h * (d_normed * h).mean(-1, keepdim=True))
    return dx.to(x.dtype), d_weight.to(weight.dtype)


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if not uses_row_kernel("rms_norm", x):
        return plain_rms_norm(x, weight, eps)
    from tp.kernels.triton.rms_norm import rms_norm_forward

    return rms_norm_forward(x, weight, eps)


def _backward(dy: Tensor, x: Tensor, weight: Tensor, reciprocal: Tensor) -> tuple[Tensor, Tensor]:
    if not uses_row_kernel("rms_norm", x):
        return plain_rms_norm_backward(dy, x, weight, reciprocal)
    from tp.kernels.triton.rms_norm import rms_norm_backward

    return rms_norm_backward(dy, x, weight, reciprocal)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, reciprocal = _forward(x, weight, eps)
        ctx.save_for_backward(x, weight, reciprocal)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        return *_backward(dy, *ctx.saved_tensors), None
