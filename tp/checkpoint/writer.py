"""Writing a model as a Hub checkpoint: whole tensors, whatever the degree, streamed, complete or not there at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tp.checkpoint.coverage import check_over_group
from tp.checkpoint.directory import CONFIG, GENERATION_CONFIG, INDEX, SINGLE_FILE
from tp.checkpoint.safetensors_file import SafetensorsFile, TensorEntry
from tp.checkpoint.tensor_source import Window, as_matrix, chunks, window_of
from tp.errors import CheckpointError
from tp.layers.parameter import named_parts
from tp.models.causal_lm import CausalLM
from tp.parallel.group import TensorParallelGroup
from tp.parallel.partition import Part

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_SHARD_BYTES = 5 * 10**9


@torch.no_grad()
def save_checkpoint(
    model: CausalLM,
    directory: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    eos_token_ids: Sequence[int] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Writes a Hub directory that transformers and `open_checkpoint` read, the same bytes at every degree.

    Every rank calls it; rank 0 writes. The lowest rank that holds a slice sends it, a few MiB at a time; no rank
    ever holds a whole tensor of others. The directory appears by one rename when it is complete.

    Args:
        directory: must not exist, or be empty.
        tokenizer: saved beside the weights; only rank 0's counts.
        eos_token_ids: for generation_config.json; by default the configuration's.
        max_shard_bytes: beyond this the weights go into several files with an index.

    Raises:
        CheckpointError: the directory is in use, or writing failed; on all ranks together.
    """
    group, target = model.group, Path(directory)
    held = _Held(model)
    tensors = group.agree(lambda: _whole_tensors(held.slices, group))
    shards = _shards(tensors, max_shard_bytes)
    writes = group.rank == 0
    partial = group.agree(lambda: _begin(target, tensors) if writes else target)
    try:
        for name, members in shards.items():
            _write_shard(SafetensorsFile(partial / name, [m.entry for m in members]) if writes else None, members, held)
        group.agree(lambda: _finish(model, partial, target, shards, tokenizer, eos_token_ids) if writes else None)
    except BaseException:
        if writes:
            shutil.rmtree(partial, ignore_errors=True)
        raise


@dataclass(frozen=True)
class _Slice:
    """One rank's slice of a Hub tensor, as the others need to know it."""

    part: Part
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _WholeTensor:
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


class _Held:
    """What this rank holds: its slices, and their values by name and place."""

    def __init__(self, model: CausalLM) -> None:
        self.group = model.group
        self.slices: list[_Slice] = []
        self._values: dict[tuple[str, int], Tensor] = {}
        for parameter in named_parts(model):
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


def _whole_tensors(slices: list[_Slice], group: TensorParallelGroup) -> list[_WholeTensor]:
    """All Hub tensors of the model, in the order of rank 0's parameters.

    Raises:
        CheckpointError: elements that no rank holds, or a dtype that safetensors files of weights do not have.
    """
    slices_of_ranks: list[list[_Slice]] = group.communicator.all_gather_object(slices)
    check_over_group([[held.part for held in rank_slices] for rank_slices in slices_of_ranks], ())
    found: dict[str, tuple[TensorEntry, list[Part]]] = {}
    for rank, rank_slices in enumerate(slices_of_ranks):
        for held in rank_slices:
            entry = TensorEntry(held.part.name, held.shape, held.dtype)
            known, parts = found.setdefault(held.part.name, (entry, []))
            if known != entry:
                raise CheckpointError(f"{entry.name} is {entry.dtype} {entry.shape} on rank {rank}, elsewhere {known}")
            if held.part.sharers[0] == rank:
                parts.append(held.part)
    return [
        _WholeTensor(entry, tuple(sorted(parts, key=lambda part: part.global_start))) for entry, parts in found.values()
    ]


def _shards(tensors: Sequence[_WholeTensor], max_shard_bytes: int) -> dict[str, list[_WholeTensor]]:
    """Deals the tensors out to files, in order, none above `max_shard_bytes` unless by a single tensor."""
    files: list[list[_WholeTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if files[-1] and size + tensor.entry.nbytes > max_shard_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.entry.nbytes
    if len(files) == 1:
        return {SINGLE_FILE: files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": members for i, members in enumerate(files, start=1)}


def _begin(target: Path, tensors: Sequence[_WholeTensor]) -> Path:
    """Makes the directory beside `target` that the files go to until all are complete."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not an empty directory: choose another, nothing was written")
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        free = shutil.disk_usage(partial).free
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror}") from error
    needed = sum(tensor.entry.nbytes for tensor in tensors)
    if free < needed:
        partial.rmdir()
        raise CheckpointError(f"{target} needs {needed} bytes, {free} are free on that disk")
    return partial


def _write_shard(file: SafetensorsFile | None, tensors: Sequence[_WholeTensor], held: _Held) -> None:
    """Streams one file's tensors to rank 0, the only one that has a `file`.

    A rank 0 that cannot write goes on taking part, so that nobody waits for it, and tells all at the end.
    """
    for tensor in tensors:
        for sender, part, window in tensor.pieces():
            piece = held.fetch(sender, part, window, tensor.entry.dtype)
            if file is not None:
                file.write(tensor.entry.name, window, piece)
    held.group.agree(lambda: file.finish() if file is not None else None)


def _finish(
    model: CausalLM,
    partial: Path,
    target: Path,
    shards: dict[str, list[_WholeTensor]],
    tokenizer: PreTrainedTokenizerBase | None,
    eos_token_ids: Sequence[int] | None,
) -> None:
    """Writes what stands beside the weights, and gives the directory its name."""
    config = model.config.to_hf() | {"dtype": str(model.dtype).removeprefix("torch.")}
    eos = list(model.config.eos_token_ids if eos_token_ids is None else eos_token_ids)
    generation = {name: config.get(name) for name in ("bos_token_id", "pad_token_id")} | {"eos_token_id": eos or None}
    try:
        _write_json(partial / CONFIG, config)
        _write_json(partial / GENERATION_CONFIG, {name: ids for name, ids in generation.items() if ids is not None})
        if len(shards) > 1:
            _write_json(partial / INDEX, _index(shards))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(partial))
        for path in (*partial.iterdir(), partial):
            _sync(path)
        partial.rename(target)
        _sync(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from error


def _index(shards: dict[str, list[_WholeTensor]]) -> dict[str, Any]:
    total = sum(tensor.entry.nbytes for members in shards.values() for tensor in members)
    table = {tensor.entry.name: file for file, members in shards.items() for tensor in members}
    return {"metadata": {"total_size": total}, "weight_map": table}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
