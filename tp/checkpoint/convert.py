"""Any readable checkpoint to a Hub directory: re-typed and re-sharded, a few MiB in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tp.checkpoint.loader import Checkpoint
from tp.checkpoint.new_directory import new_directory
from tp.checkpoint.safetensors_file import SafetensorsFile, TensorEntry
from tp.checkpoint.tensor_source import chunks, num_columns, window_of
from tp.checkpoint.writer import DEFAULT_SHARD_BYTES, deal_out, write_settings
from tp.dtypes import dtype_name
from tp.models.causal_lm import CausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def convert_checkpoint(
    checkpoint: Checkpoint,
    directory: str | Path,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes the checkpoint's tensors as `dtype`, with its configuration, end ids and tokenizer. One process.

    Args:
        progress: called with (bytes written, bytes to write).

    Raises:
        CheckpointError: the checkpoint does not fit its configuration, or the directory cannot be written.
    """
    model = CausalLM(checkpoint.config, checkpoint.group, dtype=dtype, device="meta")
    checkpoint.verify(model)
    wanted = [name for name in checkpoint.source.tensors if not checkpoint.may_stay_unread(name)]
    entries = [TensorEntry(name, tuple(checkpoint.source.tensors[name].shape), dtype) for name in wanted]
    total = sum(entry.nbytes for entry in entries)
    written = 0
    files = deal_out(entries, max_shard_bytes)
    with new_directory(Path(directory), checkpoint.group, total) as partial:
        for name, members in files.items():
            file = SafetensorsFile(partial / name, members)
            for entry in members:
                for rows in chunks(range(entry.shape[0]), num_columns(entry.shape) * dtype.itemsize):
                    piece = torch.empty((len(rows), *entry.shape[1:]), dtype=dtype, device="cpu")
                    checkpoint.source.read_into(entry.name, 0, rows.start, len(rows), piece)
                    file.write(entry.name, window_of(entry.shape, 0, rows.start, len(rows)), piece)
                    written += piece.nbytes
                    if progress is not None:
                        progress(written, total)
            file.finish()
        config = checkpoint.config.to_hf() | {"dtype": dtype_name(dtype)}
        write_settings(partial, config, checkpoint.generation_eos_token_ids, files, tokenizer)
