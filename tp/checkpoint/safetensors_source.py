"""Tensors in safetensors files: one, or the several that an index names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tp.checkpoint.file_reader import FileReader, read_plain
from tp.checkpoint.tensor_source import StoredTensor, num_columns, window_of
from tp.errors import CheckpointError

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
MAX_HEADER_BYTES = 100_000_000
"""Larger headers are refused, as the safetensors library itself does."""


@dataclass(frozen=True)
class _Location:
    file: FileReader
    offset: int


class SafetensorsSource:
    """The tensors of safetensors files, read by their headers alone until asked for values.

    Args:
        paths: the files; together they are one checkpoint.

    Raises:
        CheckpointError: a damaged or truncated file, or a tensor that two files hold.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self._locations: dict[str, _Location] = {}
        self._files = [FileReader(path) for path in paths]
        for file in self._files:
            for name, (tensor, offset) in _read_header(file).items():
                if name in self.tensors:
                    raise CheckpointError(f"{name} is in {self._locations[name].file.path.name} and {file.path.name}")
                self.tensors[name] = tensor
                self._locations[name] = _Location(file, offset)

    def read_into(self, name: str, dim: int, start: int, length: int, out: Tensor) -> int:
        tensor, location = self.tensors[name], self._locations[name]
        assert tensor.torch_dtype is not None, f"{name} is {tensor.dtype}"
        columns = num_columns(tensor.shape)
        window = window_of(tensor.shape, dim, start, length)
        return read_plain(location.file, location.offset, columns, tensor.torch_dtype, window, out)

    def file_of(self, name: str) -> str:
        """Name of the file that holds a tensor."""
        return self._locations[name].file.path.name

    def close(self) -> None:
        for file in self._files:
            file.close()


def _read_header(file: FileReader) -> dict[str, tuple[StoredTensor, int]]:
    """Tensors of one file with the offsets of their values from the beginning of the file.

    The format: 8 bytes of header length, little-endian; the header, JSON; then the values, which the
    header addresses relative to its own end.
    """
    try:
        size = file.path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{file.path} cannot be read: {error.strerror}") from error
    length = int.from_bytes(_read_bytes(file, 0, 8), "little") if size >= 8 else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(f"{file.path} is not a safetensors file, or is truncated")
    try:
        header = json.loads(_read_bytes(file, 8, length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {name: _describe(file.path, name, entry, 8 + length, size) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file.path} has a damaged safetensors header: {error}") from error


def _describe(path: Path, name: str, entry: Mapping[str, Any], origin: int, size: int) -> tuple[StoredTensor, int]:
    begin, end = (int(position) for position in entry["data_offsets"])
    dtype = str(entry["dtype"])
    tensor = StoredTensor(tuple(int(extent) for extent in entry["shape"]), dtype, TORCH_DTYPES.get(dtype))
    if origin + end > size:
        raise CheckpointError(f"{path} is truncated: {name} ends at byte {origin + end} of {size}, fetch it again")
    if tensor.torch_dtype is not None and end - begin != tensor.numel * tensor.torch_dtype.itemsize:
        raise CheckpointError(
            f"{path}: {name} {list(tensor.shape)} {dtype} does not take the {end - begin} bytes it has"
        )
    if begin < 0:
        raise CheckpointError(f"{path}: {name} begins before the values of the file")
    return tensor, origin + begin


def _read_bytes(file: FileReader, offset: int, count: int) -> bytes:
    buffer = bytearray(count)
    file.read_runs(offset, count, count, memoryview(buffer))
    return bytes(buffer)
