"""Weights in one block of huge pages: a CPU that reads all of them for each token spends no time on its page tables."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator

import torch
from torch import Tensor, nn

HUGE_PAGE_BYTES = 2 * 2**20
ALIGNMENT = 64
"""Of each tensor in a block: a cache line."""


class Block:
    """Memory of the CPU from which tensors are taken one after the other; it lives as long as any of them."""

    def __init__(self, nbytes: int) -> None:
        memory = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them: the pages are ordinary ones
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._taken = -self._bytes.data_ptr() % HUGE_PAGE_BYTES

    @staticmethod
    def bytes_for(shape: torch.Size, dtype: torch.dtype) -> int:
        """What a tensor takes from a block."""
        return -(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor of uninitialised elements."""
        start = self._taken
        self._taken += self.bytes_for(shape, dtype)
        return self._bytes[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def materialise(model: nn.Module, device: torch.device) -> None:
    """Gives a model that was built on the meta device memory for its parameters, not yet filled; ties stay."""
    if device.type != "cpu":
        model.to_empty(device=device)
        return
    parameters = {id(parameter): parameter for _, _, parameter in _own_parameters(model)}
    block = Block(sum(Block.bytes_for(parameter.shape, parameter.dtype) for parameter in parameters.values()))
    made = {
        key: nn.Parameter(block.empty(parameter.shape, parameter.dtype), parameter.requires_grad)
        for key, parameter in parameters.items()
    }
    for module, name, parameter in list(_own_parameters(model)):
        setattr(module, name, made[id(parameter)])


def _own_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter
