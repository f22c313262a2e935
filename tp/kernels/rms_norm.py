"""Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = cast(x · rsqrt(mean(x²) + eps)) · w over the last dim.

    Statistics in float32 (float64 for float64); the normed value is rounded to x's dtype before the product
    with the weight, itself in x's dtype, as transformers does. `torch.nn.functional.rms_norm` rounds elsewhere.

    Args:
        x: [..., D]; never changed.
        weight: [D], any floating dtype.
    """
    wide = x.to(statistics_dtype(x.dtype))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight.to(x.dtype)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Where statistics are accumulated: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
