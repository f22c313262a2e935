"""Whether an operation runs as a Triton kernel. Does not import Triton itself."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

from tp.choice import enabled, warn_once

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets its kernels, on tensors of the CPU: for tests."""

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""What the kernels compute in; float64 keeps to the plain forms, which have float64 statistics."""

MAX_WIDTH = 16384
"""Elements of the longest row that a program keeps in its registers."""


def uses_triton(name: str, tensor: Tensor) -> bool:
    """Whether the operation `name` on `tensor` is a Triton kernel: on CUDA, in its dtypes, unless switched off."""
    return (tensor.is_cuda or INTERPRETED) and tensor.dtype in DTYPES and enabled(name) and is_installed(name)


def uses_row_kernel(name: str, tensor: Tensor) -> bool:
    """`uses_triton` of an operation whose programs keep whole rows [..., D], so that D ≤ `MAX_WIDTH`."""
    if not uses_triton(name, tensor):
        return False
    if tensor.shape[-1] > MAX_WIDTH:
        warn_once(name, f"rows of {tensor.shape[-1]} elements; the kernel takes up to {MAX_WIDTH}")
        return False
    return True


@cache
def is_installed(name: str) -> bool:
    """Whether Triton is there; where it is not, one warning that the operation `name` takes its plain form."""
    if importlib.util.find_spec("triton") is not None:
        return True
    warn_once(name, "Triton is not installed")
    return False
