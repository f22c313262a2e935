"""Tensors as rows, and how many of them a program takes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tp.parallel.partition import ceil_div

_TILE = 1024
"""Elements of the smallest tile: 32 for each thread of one warp."""
_ELEMENTS_PER_WARP = 512
_MAX_WARPS = 16

SEPARATE_ROUNDINGS: dict[str, Any] = {"enable_fp_fusion": False}
"""Launch option of kernels in which a product is rounded before it is added, in float32 too."""
JOINT_ROUNDINGS: dict[str, Any] = {"enable_fp_fusion": True}
"""Launch option of the others; said, since the default is not the same in all versions of Triton."""


class Tiling(NamedTuple):
    """Shape of a program's tile, as the launch arguments of a kernel.

    Attributes:
        rows: of a tile; several where rows are short.
        block: columns, the next power of two.
        num_warps: so that a thread keeps 16 or 32 elements: loads of 16 bytes, and few enough registers that
            several programs share a multiprocessor and hide each other's latency.
    """

    rows: int
    block: int
    num_warps: int

    @classmethod
    def of_width(cls, width: int) -> Tiling:
        """For rows of `width` elements, each read once and kept in registers."""
        block = next_power_of_two(width)
        rows = max(1, _TILE // block)
        return cls(rows, block, min(_MAX_WARPS, max(1, block // _ELEMENTS_PER_WARP)))

    def programs(self, num_rows: int) -> int:
        """Tiles that hold all rows."""
        return ceil_div(num_rows, self.rows)


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is no smaller than `value` ≥ 1."""
    return 1 << (value - 1).bit_length()


def readable_rows(tensor: Tensor) -> Tensor:
    """[..., D] → [rows, D] whose rows are contiguous in themselves: a view where there is one, else a copy."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def writable_rows(tensor: Tensor) -> Tensor | None:
    """[..., D] → a view [rows, D] whose rows are contiguous in themselves; None where there is none."""
    if tensor.stride(-1) != 1:
        return None
    try:
        return tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        return None


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Makes the tensor's GPU the current one, on which Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
