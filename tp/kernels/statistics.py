"""The precision of statistics: norms, softmax, losses and their sums."""

from __future__ import annotations

import torch


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Where statistics of values of `dtype` are accumulated: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
