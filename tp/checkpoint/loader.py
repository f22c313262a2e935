"""Opening a checkpoint, and reading each rank's slices of it straight into a model's parameters."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from tp.checkpoint import directory, hub
from tp.checkpoint.coverage import check_against_file, check_over_group
from tp.checkpoint.same_checkpoint import check_same_checkpoint, check_same_values
from tp.checkpoint.tensor_source import TensorSource, chunks
from tp.checkpoint.together import work_together
from tp.checkpoint.tokenizer import tokenizer_of_directory, tokenizer_of_gguf
from tp.config import ModelConfig
from tp.dtypes import DTYPES
from tp.errors import CheckpointError
from tp.layers.parameter import NamedParameter, named_parts
from tp.parallel.group import TensorParallelGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[int, int], None]
"""Called with (bytes of this rank's parameters filled so far, bytes of all of them)."""

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_RECOMPUTED_SUFFIX = ".rotary_emb.inv_freq"  # buffers that old checkpoints keep; they follow from the configuration


@dataclass(frozen=True)
class LoadReport:
    """What one rank's loading took.

    Attributes:
        bytes_read: from the checkpoint's files, headers not counted.
        seconds: from the first check to agreement of all ranks.
    """

    bytes_read: int
    seconds: float


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its settings are read and checked, its tensors known by name and shape, no values read.

    Attributes:
        config: the model that it holds.
        default_dtype: what `auto` means: the directory's own dtype; bfloat16 for GGUF.
        generation_eos_token_ids: ids that end a sequence: generation_config.json's, else the configuration's.
        source: the tensors.
        path: the directory or file.
        group: the ranks that opened it.
    """

    config: ModelConfig
    default_dtype: torch.dtype
    generation_eos_token_ids: tuple[int, ...]
    source: TensorSource
    path: Path
    group: TensorParallelGroup

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's tokenizer, with its chat template.

        Raises:
            CheckpointError: there is none that can be used.
        """
        return tokenizer_of_directory(self.path) if self.path.is_dir() else tokenizer_of_gguf(self.path)

    def verify(self, model: nn.Module) -> None:
        """Checks that loading would fill every element of `model` once and leave nothing of the checkpoint unused.

        Reads and allocates nothing, so that it can be asked of a model on the meta device. Every rank calls it;
        errors are raised on all together.

        Raises:
            CheckpointError: names the first tensor that is missing, unused, of another shape or not readable.
        """
        tensors = self.source.tensors
        self.group.agree(lambda: check_against_file(model, tensors))
        parts = [part for parameter in named_parts(model) for part in parameter.parts]
        parts_of_ranks = self.group.communicator.all_gather_object(parts)
        needed = [name for name in tensors if not self.may_stay_unread(name)]
        self.group.agree(lambda: check_over_group(parts_of_ranks, needed))

    def load_into(self, model: nn.Module, progress: Progress | None = None) -> LoadReport:
        """Fills the parameters of `model` with this rank's slices, converted to their dtype; padding becomes zero.

        Every rank calls it; errors are raised on all together.

        Raises:
            CheckpointError: as `verify`, or a file that cannot be read.
            CommunicationError: ranks have files with different values.
        """
        began = time.perf_counter()
        self.verify(model)
        bytes_read = check_same_values(self.source, self.group)
        bytes_read += work_together(self.group, lambda: self._read(model, progress))
        return LoadReport(bytes_read, time.perf_counter() - began)

    def close(self) -> None:
        """Closes the files."""
        self.source.close()

    @torch.no_grad()
    def _read(self, model: nn.Module, progress: Progress | None) -> int:
        parameters = list(named_parts(model))
        total = sum(parameter.tensor.nbytes for parameter in parameters)
        bytes_read = filled = 0
        for parameter in parameters:
            _zero_padding(parameter)
            for part in parameter.parts:
                target = parameter.slice_of(part)
                bytes_read += self.source.read_into(part.name, part.dim, part.global_start, part.length, target)
            if self._is_tied_to_stored_head(parameter):
                bytes_read += self._compare_with_head(parameter)
            filled += parameter.tensor.nbytes
            if progress is not None:
                progress(filled, total)
        return bytes_read

    def may_stay_unread(self, name: str) -> bool:
        """Whether the model gets by without this tensor: it follows from others, or is one of them again."""
        return name.endswith(_RECOMPUTED_SUFFIX) or (name == LM_HEAD and self.config.tie_word_embeddings)

    def _is_tied_to_stored_head(self, parameter: NamedParameter) -> bool:
        tied = self.config.tie_word_embeddings and LM_HEAD in self.source.tensors
        return tied and any(part.name == EMBEDDING for part in parameter.parts)

    def _compare_with_head(self, parameter: NamedParameter) -> int:
        """Some files keep the LM head of a tied model as well: it must be the embedding."""
        bytes_read = 0
        head = self.source.tensors[LM_HEAD]
        for part in parameter.parts:
            same = head.shape == self.source.tensors[part.name].shape and head.torch_dtype is not None
            own = parameter.slice_of(part)
            for rows in chunks(range(part.length if same else 0), own[:1].nbytes):
                stored = torch.empty_like(own[rows.start : rows.stop])
                bytes_read += self.source.read_into(LM_HEAD, 0, part.global_start + rows.start, len(rows), stored)
                same = same and torch.equal(stored, own[rows.start : rows.stop])
            if not same:
                raise CheckpointError(
                    f"{self.path}: {LM_HEAD} differs from {EMBEDDING}, but the configuration ties them: "
                    "set tie_word_embeddings to false"
                )
        return bytes_read


def open_checkpoint(path: str | Path, group: TensorParallelGroup) -> Checkpoint:
    """Opens a Hub directory, a Hub id or a GGUF file. Every rank calls it; errors are raised on all together.

    Raises:
        CheckpointError: nothing there, not a checkpoint, incomplete or damaged.
        ConfigError: a model that is not supported, or a degree above its number of query heads.
        CommunicationError: ranks opened different checkpoints.
    """
    resolved = hub.resolve(str(path), group)

    def open_there() -> Checkpoint:
        checkpoint = _open_directory(resolved, group) if resolved.is_dir() else _open_file(resolved, group)
        checkpoint.config.check_degree(group.size)
        return checkpoint

    checkpoint = group.agree(open_there)
    check_same_checkpoint(checkpoint)
    return checkpoint


def _open_directory(path: Path, group: TensorParallelGroup) -> Checkpoint:
    config = ModelConfig.from_hf(directory.read_config(path))
    config.check_degree(group.size)
    eos_token_ids = directory.generation_eos_token_ids(path)
    source = directory.open_weights(path)
    dtype = _dtype_named(config.dtype, path) if config.dtype else _commonest_dtype(source)
    return Checkpoint(
        config=config,
        default_dtype=dtype,
        generation_eos_token_ids=config.eos_token_ids if eos_token_ids is None else eos_token_ids,
        source=source,
        path=path,
        group=group,
    )


def _open_file(path: Path, group: TensorParallelGroup) -> Checkpoint:
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} is one file of a checkpoint: give the directory that holds it")
    from tp.checkpoint.gguf_config import hub_config
    from tp.checkpoint.gguf_header import GgufHeader
    from tp.checkpoint.gguf_rope import read_rope_factors
    from tp.checkpoint.gguf_source import GgufSource

    header = GgufHeader.read(path)
    config = ModelConfig.from_hf(hub_config(header, read_rope_factors(header)))
    config.check_degree(group.size)
    return Checkpoint(
        config=config,
        default_dtype=torch.bfloat16,
        generation_eos_token_ids=config.eos_token_ids,
        source=GgufSource(header, config.num_attention_heads, config.num_kv_heads),
        path=path,
        group=group,
    )


def _dtype_named(name: str, path: Path) -> torch.dtype:
    if name not in DTYPES:
        raise CheckpointError(f"{path}: config.json names dtype {name!r}: choose from {', '.join(DTYPES)}")
    return DTYPES[name]


def _commonest_dtype(source: TensorSource) -> torch.dtype:
    """The dtype of most elements, for a configuration that names none."""
    elements: Counter[torch.dtype] = Counter()
    for tensor in source.tensors.values():
        if tensor.torch_dtype is not None:
            elements[tensor.torch_dtype] += tensor.numel
    return elements.most_common(1)[0][0] if elements else torch.float32


def _zero_padding(parameter: NamedParameter) -> None:
    """Rows past the last part belong to no tensor of the checkpoint."""
    if not parameter.parts:
        parameter.tensor.zero_()
        return
    dim = parameter.parts[0].dim
    filled = sum(part.length for part in parameter.parts)
    parameter.tensor.narrow(dim, filled, parameter.tensor.shape[dim] - filled).zero_()
