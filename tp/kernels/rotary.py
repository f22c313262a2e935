"""Applying the rotary embedding (Su et al. 2021, arXiv:2104.09864) to queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """y = x·cos + rotate_half(x)·sin, each product and the sum rounded to x's dtype.

    Args:
        x: [N, H, d] queries or keys.
        cos, sin: [N, 1, d] in x's dtype.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
