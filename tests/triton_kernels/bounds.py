"""How far results may be apart, in units in the last place."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def ulps(value: Tensor, reference: Tensor) -> float:
    """max |value − reference| in units in the last place of value's dtype, as large as at each reference."""
    exact = reference.double()
    unit = torch.finfo(value.dtype).eps * 2 ** exact.abs().clamp_min(torch.finfo(value.dtype).tiny).log2().floor()
    return float(((value.double() - exact).abs() / unit).max()) if value.numel() else 0.0


def assert_agree(y: Tensor, expected: Tensor) -> None:
    """Norms whose statistics are a few units apart: in float32 so are they; else hardly any is rounded elsewhere."""
    if y.dtype == torch.float32:
        assert ulps(y, expected) <= 8
    else:
        assert ulps(y, expected) <= 2
        assert int((y != expected).sum()) <= max(1, y.numel() // 100)
