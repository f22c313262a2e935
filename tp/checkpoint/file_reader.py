"""Positional reads of one file, exact to the byte.

Files are read with `preadv` rather than through a memory map: what was read is known, the pages do not count
as this process's memory, and a file that shrinks gives an error instead of a signal.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from tp.checkpoint.tensor_source import Window, as_matrix, chunks
from tp.errors import CheckpointError


class FileReader:
    """One file, opened at the first read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def read_runs(self, offset: int, run_bytes: int, stride: int, into: memoryview) -> None:
        """Fills `into` with runs of `run_bytes`, the k-th of which begins at `offset + k · stride` in the file.

        Raises:
            CheckpointError: the file cannot be opened or read, or ends within a run.
        """
        if run_bytes == stride or run_bytes == len(into):
            self._read(offset, into)
            return
        for k, position in enumerate(range(0, len(into), run_bytes)):
            self._read(offset + k * stride, into[position : position + run_bytes])

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _read(self, offset: int, into: memoryview) -> None:
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            done = 0
            while done < len(into):  # one call moves at most 2 GiB
                count = os.preadv(self._descriptor, [into[done:]], offset + done)
                if count == 0:
                    raise CheckpointError(f"{self.path} ends at byte {offset + done}: it is truncated, fetch it again")
                done += count
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def read_plain(file: FileReader, offset: int, num_columns: int, dtype: torch.dtype, window: Window, out: Tensor) -> int:
    """Reads a rectangle of a row-major matrix of plain elements into `out`, converting to its dtype.

    Where `out` is contiguous CPU memory of the file's dtype the values go straight there; else through a
    buffer of `STAGING_BYTES`.

    Args:
        offset: where the matrix begins in the file.
        num_columns: columns of the stored matrix.
        dtype: element type of the file.
        out: the rectangle, as a matrix or a vector.

    Returns:
        Bytes read.
    """
    target = as_matrix(out)
    if target.numel() == 0:
        return 0
    stride = num_columns * dtype.itemsize
    run_bytes = len(window.columns) * dtype.itemsize
    origin = offset + window.columns.start * dtype.itemsize
    if target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous():
        file.read_runs(origin + window.rows.start * stride, run_bytes, stride, bytes_of(target))
        return target.numel() * dtype.itemsize
    staged: Tensor | None = None
    for rows in chunks(window.rows, run_bytes):
        if staged is None:
            staged = torch.empty((len(rows), len(window.columns)), dtype=dtype, device="cpu")
        block = staged[: len(rows)]
        file.read_runs(origin + rows.start * stride, run_bytes, stride, bytes_of(block))
        first = rows.start - window.rows.start
        target[first : first + len(rows)].copy_(block)
    return target.numel() * dtype.itemsize
