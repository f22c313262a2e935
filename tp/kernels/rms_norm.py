"""Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tp.kernels.statistics import statistics_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = n · w with n = cast(x · r), r = rsqrt(mean(x²) + eps), over the last dim.

    Statistics in float32 (float64 for float64); the normed value is rounded to x's dtype before the product
    with the weight, itself in x's dtype, as transformers does. `torch.nn.functional.rms_norm` rounds elsewhere.

    Backward, with dn = dy · w: dx = r · (dn − h · mean(dn · h)) where h = x · r; dw = Σ_rows dy · n. Only x and r
    are saved.

    Args:
        x: [..., D]; never changed.
        weight: [D], any floating dtype.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        y: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
        return y
    return _forward(x, weight, eps)[0]


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.to(statistics_dtype(x.dtype))
    reciprocal = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * reciprocal).to(x.dtype) * weight.to(x.dtype), reciprocal


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, reciprocal = _forward(x, weight, eps)
        ctx.save_for_backward(x, weight, reciprocal)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, reciprocal = ctx.saved_tensors
        h = x.to(reciprocal.dtype) * reciprocal
        d_weight = (dy.to(h.dtype) * h.to(x.dtype)).reshape(-1, x.shape[-1]).sum(0)
        d_normed = (dy * weight.to(x.dtype)).to(reciprocal.dtype)
        dx = reciprocal * (d_normed - h * (d_normed * h).mean(-1, keepdim=True))
        return dx.to(x.dtype), d_weight.to(weight.dtype), None
