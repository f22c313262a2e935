"""Which dtypes a CPU multiplies faster as float32: those that it has no matrix product for."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tp.choice import enabled

NAME = "upcast_matmul"
"""For `tp.choice`."""


def faster_in_float32(x: Tensor) -> bool:
    """Whether products of many rows like x had better be taken in float32; without gradients only."""
    return x.is_cpu and not torch.is_grad_enabled() and _lacks_products(x.dtype) and enabled(NAME)


@functools.cache
def _lacks_products(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported()
