"""The header of a GGUF file: metadata and the table of tensors.

The layout is that of version 2 and 3 of the format (ggml's docs/gguf.md): magic, version, counts, key-value
pairs, tensor infos, padding, tensor data. Long arrays, those of the vocabulary, are stepped over: as Python objects
they would take hundreds of megabytes on every rank, for a loader that needs none of them.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from tp.errors import CheckpointError
from tp.parallel.partition import ceil_div

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
LARGEST_HEADER = 2**26
"""Bytes, above any vocabulary's; what claims more is damaged, and is not searched to its end."""
LONGEST_ARRAY = 2**14
"""Numbers of an array that is kept: settings by layer."""
MOST_DIMENSIONS = 4
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table.

    Attributes:
        shape: sizes in row-major order (the file lists them fastest first).
        type_id: ggml's number of the element type.
        offset: where the values begin, from the beginning of the file.
    """

    shape: tuple[int, ...]
    type_id: int
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensors of a GGUF file.

    Attributes:
        metadata: scalars, strings and arrays of numbers; None for arrays of strings and for long ones.
        tensors: by their GGUF names.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def read(cls, path: Path) -> GgufHeader:
        """Reads the header of a file.

        Raises:
            CheckpointError: no GGUF file, another version or byte order, or a damaged or truncated one.
        """
        try:
            if not path.is_file():
                raise CheckpointError(f"{path} cannot be read: it is not a regular file")
            length = min(path.stat().st_size, LARGEST_HEADER)
            with path.open("rb") as file, mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ) as data:
                return _Parser(path, data).header()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except (struct.error, ValueError, OverflowError) as error:
            raise CheckpointError(f"{path} is a damaged or truncated GGUF file: {error}") from error


class _Parser:
    """A cursor over the bytes of a file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position = path, data, 0

    def header(self) -> GgufHeader:
        if self.data[:4] != MAGIC:
            raise CheckpointError(f"{self.path} is not a GGUF file")
        self.position = 4
        (version,) = self.take("I")
        if version not in VERSIONS:
            kind = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise CheckpointError(f"{self.path} is a {kind} GGUF file: only little-endian versions 2 and 3 are read")
        num_tensors, num_pairs = self.take("QQ")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self.string()
            if key in metadata:
                raise ValueError(f"{key!r} is set twice")
            metadata[key] = self.value(self.take("I")[0])
        infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self.string()
            if name in infos:
                raise ValueError("two tensors have the same name")
            infos[name] = self.tensor_info()
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r}, no power of two")
        origin = ceil_div(self.position, alignment) * alignment
        tensors = {name: GgufTensor(shape, kind, origin + start) for name, (shape, kind, start) in infos.items()}
        return GgufHeader(self.path, metadata, tensors)

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.data, self.position)
        self.position += struct.calcsize("<" + layout)
        return values

    def string(self) -> str:
        (length,) = self.take("Q")
        begin = self.position
        self.skip(length)
        return self.data[begin : self.position].decode()

    def skip(self, length: int) -> None:
        self.position += length
        if self.position > len(self.data):
            raise ValueError("a string or array reaches past the end")

    def skip_strings(self, count: int) -> None:
        """Steps over `count` strings; a vocabulary and its merges are hundreds of thousands."""
        if count * _LENGTH.size > len(self.data) - self.position:
            raise ValueError(f"an array claims {count} strings: there is no room for their lengths")
        position, length_at = self.position, _LENGTH.unpack_from
        for _ in range(count):
            position += _LENGTH.size + length_at(self.data, position)[0]
        self.skip(position - self.position)

    def value(self, kind: int) -> Any:
        """One metadata value; None for an array of strings or of many numbers, which is stepped over."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.take(_code(kind))[0]
        item_kind, count = self.take("IQ")
        if item_kind == _STRING:
            self.skip_strings(count)
            return None
        begin, code = self.position, _code(item_kind)
        self.skip(count * struct.calcsize("<" + code))
        return list(struct.unpack_from(f"<{count}{code}", self.data, begin)) if count <= LONGEST_ARRAY else None

    def tensor_info(self) -> tuple[tuple[int, ...], int, int]:
        (num_dims,) = self.take("I")
        if num_dims > MOST_DIMENSIONS:
            raise ValueError(f"a tensor has {num_dims} dimensions")
        dims = self.take(f"{num_dims}Q")
        kind, start = self.take("IQ")
        return tuple(reversed(dims)), kind, start


def _code(kind: int) -> str:
    """Of `struct`, of a kind of scalar."""
    if kind not in _SCALARS:
        raise ValueError(f"there is no type {kind} of values")
    return _SCALARS[kind]
