"""Tensors in safetensors files: one, or the several that an index names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tp.checkpoint.file_reader import FileReader, read_plain
from tp.checkpoint.tensor_source import StoredTensor, num_columns, window_of
from tp.errors import CheckpointError
from tp.json_objects import LARGEST_BYTES, parse

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
ITEM_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "BF16": 16, "F16": 16, "F32": 32, "F64": 64,
}  # fmt: skip
"""Every element type of the format."""
MOST_DIMENSIONS = 8
"""Of a tensor in a file; those of a decoder have two."""


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
    if not 2 <= length <= min(LARGEST_BYTES, size - 8):
        raise CheckpointError(f"{file.path} is not a safetensors file, or is truncated")
    origin = 8 + length
    try:
        header = parse(_read_bytes(file, 8, length))
        metadata = header.get("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("__metadata__ is no object of strings")
        entries = {name: _entry(entry) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file.path} has a damaged safetensors header: {_said(error)}") from error
    for name, entry in entries.items():
        _check_extent(file.path, name, entry, origin, size)
    _check_tiled(file.path, entries, size - origin)
    return {name: (entry.tensor, origin + entry.begin) for name, entry in entries.items()}


def _said(error: Exception) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)


@dataclass(frozen=True)
class _Entry:
    """What a header says of one tensor; `begin` and `end` count from the end of the header."""

    tensor: StoredTensor
    begin: int
    end: int


def _entry(entry: Mapping[str, Any]) -> _Entry:
    begin, end = entry["data_offsets"]
    shape, dtype = entry["shape"], entry["dtype"]
    if not isinstance(shape, list) or not all(type(number) is int for number in (begin, end, *shape)):
        raise TypeError("offsets and shapes are lists of integers")
    if min(shape, default=0) < 0 or len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"shape {shape[:MOST_DIMENSIONS]} is negative, or has more than {MOST_DIMENSIONS} dimensions")
    if dtype not in ITEM_BITS:
        raise ValueError(f"there is no dtype {dtype!r}")
    return _Entry(StoredTensor(tuple(shape), dtype, TORCH_DTYPES.get(dtype)), begin, end)


def _check_extent(path: Path, name: str, entry: _Entry, origin: int, size: int) -> None:
    """Refuses a tensor whose bytes lie outside the file, or are not as many as its shape and dtype take."""
    tensor = entry.tensor
    if origin + entry.end > size:
        raise CheckpointError(
            f"{path} is truncated: {name} ends at byte {origin + entry.end} of {size}, fetch it again"
        )
    if 8 * (entry.end - entry.begin) != tensor.numel * ITEM_BITS[tensor.dtype]:
        raise CheckpointError(
            f"{path}: {name} {list(tensor.shape)} {tensor.dtype} does not take the {entry.end - entry.begin} bytes "
            "it has"
        )
    if entry.begin < 0:
        raise CheckpointError(f"{path}: {name} begins before the values of the file")


def _check_tiled(path: Path, entries: Mapping[str, _Entry], size: int) -> None:
    """The format leaves no gap between tensors, and no two share bytes."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            wrong = "shares bytes with the tensor before it" if entry.begin < position else "leaves a gap before it"
            raise CheckpointError(f"{path} has a damaged safetensors header: {name} {wrong}")
        position = entry.end
    if position != size:
        raise CheckpointError(f"{path} has {size - position} bytes that belong to no tensor: it is damaged")


def _read_bytes(file: FileReader, offset: int, count: int) -> bytes:
    buffer = bytearray(count)
    file.read_runs(offset, count, count, memoryview(buffer))
    return bytes(buffer)
