"""Writing one safetensors file whose tensors arrive piece by piece, in any order."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from tp.checkpoint.file_reader import bytes_of
from tp.checkpoint.safetensors_source import TORCH_DTYPES
from tp.checkpoint.tensor_source import Window, num_columns
from tp.errors import CheckpointError

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """What a safetensors header says of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """A file whose header is written first, since names and shapes are known, and whose values follow.

    An error of the disk is kept until `finish`, so that a writer who serves others can go on taking from them.

    Raises:
        CheckpointError: a tensor of a dtype that is not a float.
    """

    def __init__(self, path: Path, entries: Sequence[TensorEntry]) -> None:
        self._path = path
        self._descriptor = -1
        self._error: Exception | None = None
        self._entries = {entry.name: entry for entry in entries}
        self._offsets: dict[str, int] = {}
        try:
            header = self._lay_out(entries)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            self._put(0, memoryview(header))
        except (OSError, CheckpointError) as error:
            self._error = error

    def write(self, name: str, window: Window, values: Tensor) -> None:
        """Writes a rectangle [rows, columns] of a tensor, seen as a matrix, from any device."""
        if self._error is not None:
            return
        entry = self._entries[name]
        stride, run = num_columns(entry.shape) * entry.dtype.itemsize, len(window.columns) * entry.dtype.itemsize
        origin = self._offsets[name] + window.rows.start * stride + window.columns.start * entry.dtype.itemsize
        data = bytes_of(values.cpu().contiguous())
        runs = [data] if run == stride else [data[start : start + run] for start in range(0, len(data), run)]
        try:
            for row, content in enumerate(runs):
                self._put(origin + row * stride, content)
        except OSError as error:
            self._error = error

    def finish(self) -> None:
        """Brings everything to the disk and closes the file.

        Raises:
            CheckpointError: what went wrong since the beginning.
        """
        try:
            if self._error is None:
                os.fsync(self._descriptor)
        except OSError as error:
            self._error = error
        if self._descriptor >= 0:
            os.close(self._descriptor)
        if isinstance(self._error, CheckpointError):
            raise self._error
        if isinstance(self._error, OSError):
            raise CheckpointError(f"{self._path} cannot be written: {self._error.strerror}") from self._error

    def _lay_out(self, entries: Sequence[TensorEntry]) -> bytes:
        """The header, padded to 8 bytes; notes where in the file each tensor begins."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for entry in entries:
            if entry.dtype not in _NAMES:
                raise CheckpointError(f"{entry.name} is {entry.dtype}: only weights in floating point are saved")
            offsets = [position, position + entry.nbytes]
            header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
            self._offsets[entry.name] = position
            position += entry.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        for name in self._offsets:
            self._offsets[name] += 8 + len(text)
        return len(text).to_bytes(8, "little") + text

    def _put(self, offset: int, content: memoryview) -> None:
        done = 0
        while done < len(content):
            done += os.pwrite(self._descriptor, content[done:], offset + done)
