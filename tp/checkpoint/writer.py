"""Writing a model as a Hub checkpoint: whole tensors, whatever the degree, streamed, complete or not there at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tp.checkpoint.directory import CONFIG, GENERATION_CONFIG, INDEX, SINGLE_FILE
from tp.checkpoint.new_directory import new_directory
from tp.checkpoint.safetensors_file import TensorEntry
from tp.checkpoint.tensor_writer import HeldTensors, whole_tensors, write_tensors
from tp.checkpoint.tokenizer import as_checkpoint_error
from tp.dtypes import dtype_name
from tp.errors import CheckpointError
from tp.layers.parameter import named_parts
from tp.models.causal_lm import CausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_SHARD_BYTES = 5 * 10**9


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
    with new_directory(Path(directory), model.group, weight_bytes_of_whole(model)) as partial:
        write_model(model, partial, tokenizer, eos_token_ids=eos_token_ids, max_shard_bytes=max_shard_bytes)


def weight_bytes_of_whole(model: CausalLM) -> int:
    """Bytes of all tensors that the ranks hold together, each counted by the lowest rank that holds it."""
    own = sum(
        parameter.slice_of(part).nbytes
        for parameter in named_parts(model)
        for part in parameter.parts
        if part.sharers[0] == model.group.rank
    )
    return sum(model.group.communicator.all_gather_object(own))


@torch.no_grad()
def write_model(
    model: CausalLM,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    eos_token_ids: Sequence[int] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """`save_checkpoint` into a directory that is there already, not atomically."""
    held = HeldTensors(named_parts(model), model.group)
    tensors = model.group.agree(lambda: whole_tensors(held))
    files = deal_out([tensor.entry for tensor in tensors], max_shard_bytes)
    by_name = {tensor.entry.name: tensor for tensor in tensors}
    for file, entries in files.items():
        write_tensors(directory / file, [by_name[entry.name] for entry in entries], held)
    eos = model.config.eos_token_ids if eos_token_ids is None else eos_token_ids
    config = model.config.to_hf() | {"dtype": dtype_name(model.dtype)}
    writes = model.group.rank == 0
    model.group.agree(lambda: write_settings(directory, config, eos, files, tokenizer) if writes else None)


def deal_out(entries: Sequence[TensorEntry], max_shard_bytes: int) -> dict[str, list[TensorEntry]]:
    """Deals tensors out to files, in order, none above `max_shard_bytes` unless by a single tensor."""
    files: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in entries:
        if files[-1] and size + entry.nbytes > max_shard_bytes:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.nbytes
    if len(files) == 1:
        return {SINGLE_FILE: files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": members for i, members in enumerate(files, start=1)}


def write_settings(
    directory: Path,
    config: dict[str, Any],
    eos_token_ids: Sequence[int],
    files: dict[str, list[TensorEntry]],
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Writes what stands beside the weights: configuration, index, tokenizer.

    Raises:
        CheckpointError: a file that cannot be written, or a tokenizer that cannot be saved.
    """
    generation = {name: config.get(name) for name in ("bos_token_id", "pad_token_id")}
    generation["eos_token_id"] = list(eos_token_ids) or None
    try:
        write_json(directory / CONFIG, config)
        write_json(directory / GENERATION_CONFIG, {name: ids for name, ids in generation.items() if ids is not None})
        if len(files) > 1:
            write_json(directory / INDEX, _index(files))
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be written: {error.strerror or error}") from error
    if tokenizer is not None:
        with as_checkpoint_error(f"{directory} cannot be written: the tokenizer"):
            tokenizer.save_pretrained(str(directory))


def _index(files: dict[str, list[TensorEntry]]) -> dict[str, Any]:
    total = sum(entry.nbytes for entries in files.values() for entry in entries)
    table = {entry.name: file for file, entries in files.items() for entry in entries}
    return {"metadata": {"total_size": total}, "weight_map": table}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON for people to read: indented, keys in order."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
