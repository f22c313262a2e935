"""Weights in one block of huge pages: a CPU that reads all of them for each token spends no time on its page tables."""

from __future__ import annotations

import contextlib
import ctypes
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


def give_back(tensor: Tensor) -> None:
    """Frees the memory of a tensor that nobody reads any more, though others of its block live on. CPU tensors only.

    A tensor that has its memory alone is left alone: that goes with the last reference.
    """
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if madvise is not None and hasattr(mmap, "MADV_DONTNEED") and stop > start:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


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
