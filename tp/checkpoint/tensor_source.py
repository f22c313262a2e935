"""What the loader asks of a file format: which tensors there are, and slices of them read straight into place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

STAGING_BYTES = 2 * 1024 * 1024
"""Size of the buffers that values pass through on their way from a file to a parameter of another dtype or device.

A few of them live at once while a quantised tensor is decoded. Larger ones are no faster, and leave the cache.
"""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, as its file describes it.

    Attributes:
        shape: sizes in the Hub's (row-major) order.
        dtype: the format's own name of the element type ("BF16", "Q4_K"), for messages.
        torch_dtype: the torch dtype that the values have after reading, before any conversion;
            None where the values cannot be read (integers, float8, an unknown quantisation).
    """

    shape: tuple[int, ...]
    dtype: str
    torch_dtype: torch.dtype | None

    @property
    def numel(self) -> int:
        return prod(self.shape)


class TensorSource(Protocol):
    """A checkpoint's tensors under their names in the Hub layout.

    A tensor whose name has no counterpart in the Hub layout keeps the name that its file gives it.
    """

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor of the checkpoint. Known from headers: no values have been read."""
        ...

    def read_into(self, name: str, dim: int, start: int, length: int, out: Tensor) -> int:
        """Reads [start, start + length) along `dim` of a stored tensor into `out`, converting to its dtype.

        Temporaries stay below 64 MiB. Call under `torch.no_grad()` where `out` is (a view of) a parameter.

        Args:
            out: the stored tensor's shape with `length` along `dim`; may be strided and on any device.

        Returns:
            Bytes read from the file: with plain element types exactly those of the slice; with
            quantised ones those of the blocks that cover it.

        Raises:
            CheckpointError: the file cannot be read or ends too early.
        """
        ...

    def close(self) -> None:
        """Closes the files. Reading again opens them again."""
        ...


@dataclass(frozen=True)
class Window:
    """A rectangle of a stored matrix; a vector is a matrix of one column."""

    rows: range
    columns: range


def window_of(shape: Sequence[int], dim: int, start: int, length: int) -> Window:
    """The rectangle that is [start, start + length) along `dim` of a tensor of one or two dimensions."""
    cut = range(start, start + length)
    return Window(cut, range(num_columns(shape))) if dim == 0 else Window(range(shape[0]), cut)


def num_columns(shape: Sequence[int]) -> int:
    """Columns of a tensor of one or two dimensions, seen as a matrix."""
    return shape[1] if len(shape) == 2 else 1


def as_matrix(tensor: Tensor) -> Tensor:
    """A view [rows, columns] of a tensor of one or two dimensions."""
    return tensor.detach().unsqueeze(1) if tensor.dim() == 1 else tensor.detach()


def chunks(rows: range, bytes_per_row: int, *, multiple: int = 1) -> list[range]:
    """Cuts `rows` into consecutive ranges of at most `STAGING_BYTES`, their lengths multiples of `multiple`.

    A range is never shorter than `multiple` rows, except the last.
    """
    step = max(1, STAGING_BYTES // max(1, bytes_per_row * multiple)) * multiple
    return [range(start, min(start + step, rows.stop)) for start in range(rows.start, rows.stop, step)]
