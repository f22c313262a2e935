"""Assembling whole tensors of the Hub layout from the slices that ranks hold, and streaming them to files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tp.checkpoint.coverage import check_over_group
from tp.checkpoint.safetensors_file import SafetensorsFile, TensorEntry
from tp.checkpoint.tensor_source import Window, as_matrix, chunks, window_of
from tp.errors import CheckpointError
from tp.layers.parameter import NamedParameter
from tp.parallel.group import TensorParallelGroup
from tp.parallel.partition import Part


@dataclass(frozen=True)
class _Slice:
    """One rank's slice of a Hub tensor, as the others need to know it."""

    part: Part
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class WholeTensor:
    """A Hub tensor and the slices that make it, with the rank that sends each."""

    entry: TensorEntry
    slices: tuple[Part, ...]

    def pieces(self) -> Iterator[tuple[int, Part, Window]]:
        """(sender, its part, a rectangle of the whole matrix of bounded size), the same on every rank."""
        itemsize = self.entry.dtype.itemsize
        for part in self.slices:
            window = window_of(self.entry.shape, part.dim, part.global_start, part.length)
            for rows in chunks(window.rows, len(window.columns) * itemsize):
                yield part.sharers[0], part, Window(rows, window.columns)


class HeldTensors:
    """What this rank holds: its slices, and their values by name and place."""

    def __init__(self, parameters: Iterable[NamedParameter], group: TensorParallelGroup) -> None:
        self.group = group
        self.slices: list[_Slice] = []
        self._values: dict[tuple[str, int], Tensor] = {}
        for parameter in parameters:
            for part in parameter.parts:
                shape = list(parameter.tensor.shape)
                shape[part.dim] = part.global_length
                self.slices.append(_Slice(part, tuple(shape), parameter.tensor.dtype))
                self._values[part.name, part.global_start] = as_matrix(parameter.slice_of(part))

    def fetch(self, sender: int, part: Part, window: Window, dtype: torch.dtype) -> Tensor:
        """A rectangle of a Hub tensor, from the rank that holds it, on every rank."""
        if sender == self.group.rank:
            first_row = part.global_start if part.dim == 0 else 0
            rows = slice(window.rows.start - first_row, window.rows.stop - first_row)
            piece = self._values[part.name, part.global_start][rows]
        else:
            piece = torch.empty(len(window.rows), len(window.columns), dtype=dtype, device=self.group.device)
        return piece if sender == 0 else self.group.communicator.broadcast(piece, source=sender)


def whole_tensors(held: HeldTensors) -> list[WholeTensor]:
    """All tensors that the ranks of the group hold together, in the order of rank 0's. Every rank calls it.

    Raises:
        CheckpointError: elements that no rank holds, or ranks that disagree about a tensor.
    """
    slices_of_ranks: list[list[_Slice]] = held.group.communicator.all_gather_object(held.slices)
    check_over_group([[own.part for own in rank_slices] for rank_slices in slices_of_ranks], ())
    found: dict[str, tuple[TensorEntry, list[Part]]] = {}
    for rank, rank_slices in enumerate(slices_of_ranks):
        for own in rank_slices:
            entry = TensorEntry(own.part.name, own.shape, own.dtype)
            known, parts = found.setdefault(own.part.name, (entry, []))
            if known != entry:
                raise CheckpointError(f"{entry.name} is {entry.dtype} {entry.shape} on rank {rank}, elsewhere {known}")
            if own.part.sharers[0] == rank:
                parts.append(own.part)
    return [
        WholeTensor(entry, tuple(sorted(parts, key=lambda part: part.global_start))) for entry, parts in found.values()
    ]


def write_tensors(path: Path, tensors: Sequence[WholeTensor], held: HeldTensors) -> None:
    """Streams tensors to rank 0, a few MiB at a time, which writes them to a safetensors file. Every rank calls it.

    A rank 0 that cannot write goes on taking part, so that nobody waits for it, and tells all at the end.
    """
    file = SafetensorsFile(path, [tensor.entry for tensor in tensors]) if held.group.rank == 0 else None
    for tensor in tensors:
        for sender, part, window in tensor.pieces():
            piece = held.fetch(sender, part, window, tensor.entry.dtype)
            if file is not None:
                file.write(tensor.entry.name, window, piece)
    held.group.agree(lambda: file.finish() if file is not None else None)
