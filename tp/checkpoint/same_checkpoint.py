"""Ranks that opened different checkpoints: told apart by their settings, their tensors, and samples of the values."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

from tp.checkpoint.tensor_source import TensorSource
from tp.checkpoint.together import work_together
from tp.parallel.agreement import check_alike, statement_of
from tp.parallel.group import TensorParallelGroup

if TYPE_CHECKING:
    from tp.checkpoint.loader import Checkpoint

SAMPLE_ELEMENTS = 4096
"""Of a vector. Of a matrix one row, whole."""


def check_same_checkpoint(checkpoint: Checkpoint) -> None:
    """Compares what every rank read of settings and headers. Every rank calls it.

    Raises:
        CommunicationError: names, on every rank, the first setting or tensor that differs.
    """
    if checkpoint.group.size == 1:
        return
    statement = statement_of("config", checkpoint.config)
    statement["checkpoint dtype"] = str(checkpoint.default_dtype)
    statement["end-of-sequence ids"] = str(checkpoint.generation_eos_token_ids)
    statement.update((f"tensor {name}", f"{t.dtype} {list(t.shape)}") for name, t in checkpoint.source.tensors.items())
    check_alike(checkpoint.group.communicator, statement)


def check_same_values(source: TensorSource, group: TensorParallelGroup) -> int:
    """Compares a row from the middle of every tensor: another training of the same model differs there, or a copy that
    is not complete. Every rank calls it.

    Returns:
        Bytes read from the files.

    Raises:
        CheckpointError: a row cannot be read. CommunicationError: names, on every rank, the first tensor that differs.
    """
    if group.size == 1:
        return 0
    samples = work_together(group, lambda: {name: _sample(source, name) for name in source.tensors})
    statement = {f"the values of {name}": digest for name, (digest, _) in samples.items()}
    check_alike(group.communicator, statement)
    return sum(bytes_read for _, bytes_read in samples.values())


def _sample(source: TensorSource, name: str) -> tuple[str | None, int]:
    """A digest of some values, and the bytes that were read for it."""
    tensor = source.tensors[name]
    if tensor.torch_dtype is None or tensor.numel == 0 or len(tensor.shape) not in (1, 2):
        return None, 0
    rows = 1 if len(tensor.shape) == 2 else min(tensor.shape[0], SAMPLE_ELEMENTS)
    sample = torch.empty((rows, *tensor.shape[1:]), dtype=tensor.torch_dtype, device="cpu")
    bytes_read = source.read_into(name, 0, (tensor.shape[0] - rows) // 2, rows, sample)
    return f"{zlib.crc32(sample.view(-1).view(torch.uint8).numpy().tobytes()):08x}", bytes_read
