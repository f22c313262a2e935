"""What a training run is made of, put together on every rank: tokenizer, data, model, optimiser."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from launch.terminal import Terminal
from launch.training_check import micro_batch_size
from launch.training_memory import parameter_dtype
from launch.training_recipe import COMPUTE_DTYPES, Recipe
from tp.checkpoint import open_checkpoint
from tp.checkpoint.together import work_together
from tp.checkpoint.tokenizer import tokenizer_of_directory
from tp.config import ModelConfig
from tp.dtypes import DTYPES
from tp.errors import CheckpointError, RequestError
from tp.json_objects import read_object
from tp.models import CausalLM, initialise_parameters
from tp.parallel.group import TensorParallelGroup
from tp.training.data import (
    Conversation,
    EvaluationBatches,
    PackedBatches,
    PlainText,
    PromptAndCompletion,
    TokenizedDataset,
    TrainingBatch,
    read_documents,
    split_documents,
    tokenize_files,
    train_tokenizer,
)
from tp.training.groups import TrainingGroups
from tp.training.mixed_precision import compute_in
from tp.training.optimizer import adamw
from tp.training.store import CheckpointStore
from tp.training.train_step import Learner

if TYPE_CHECKING:
    from tp.training.data import Document

MOST_READS_A_STEP = 1000
"""Of the data: more than the smallest set of examples needs, and few enough to be put together in moments."""


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        config: of the model.
        eos_token_ids: ids that end a text; empty where the tokenizer says.
        tokenizer: on rank 0; None on the others.
        source: what the parameters are loaded from; None where they are drawn.
        step: steps that are done.
    """

    config: ModelConfig
    eos_token_ids: tuple[int, ...]
    tokenizer: Any
    source: str | None
    step: int = 0


@dataclass(frozen=True)
class TrainingData:
    """The tokenized documents of a run, and this rank's batches of them."""

    training: TokenizedDataset
    held_out: TokenizedDataset | None
    batches: PackedBatches
    evaluation: EvaluationBatches | None
    micro_batches: int

    def of_step(self, step: int) -> list[TrainingBatch]:
        """This replica's micro-batches of a step."""
        first = step * self.micro_batches
        return [self.batches.batch(index) for index in range(first, first + self.micro_batches)]

    def fingerprint(self) -> str:
        """Of the documents that are trained on, their order and lengths."""
        return hashlib.sha256(self.training.documents.tobytes()).hexdigest()[:16]


def find_start(arguments: argparse.Namespace, recipe: Recipe, world: TensorParallelGroup) -> Start:
    """From the newest checkpoint of the run, from the model to fine-tune, or from nothing. Every rank calls it."""
    store = CheckpointStore(arguments.output)
    steps: list[int] = world.communicator.all_gather_object(store.steps() if arguments.resume else [])[0]
    if steps:
        return _start_from(str(store.path_of(steps[-1])), world, steps[-1], _asked_config(arguments, world))
    if arguments.model:
        return _start_from(arguments.model, world)
    made = work_together(world, lambda: _from_nothing(arguments, recipe) if world.rank == 0 else None)
    config: ModelConfig = world.communicator.all_gather_object(made and made.config)[0]
    return made or Start(config, config.eos_token_ids, None, None)


def load_data(
    arguments: argparse.Namespace, recipe: Recipe, start: Start, groups: TrainingGroups, terminal: Terminal
) -> TrainingData:
    """Tokenizes the files, or finds them tokenized, and holds out a part where that is asked for.

    Raises:
        RequestError: a token outside the model's vocabulary, a step that is many times the data, or as
            `tokenize_files`; on all ranks together.
    """
    with terminal.progress("tokenizing") as progress:
        training, held_out = (
            tokenize_files(
                files,
                start.tokenizer,
                groups.world,
                eos_token_ids=start.eos_token_ids,
                cache_directory=arguments.data_cache,
                progress=progress,
            )
            if files
            else None
            for files in (arguments.data, arguments.eval_data)
        )
    assert training is not None
    if recipe.eval_fraction is not None:
        training, held_out = training.split(recipe.eval_fraction, recipe.seed)
    _check_vocabulary(training, start.config)
    if held_out is not None:
        _check_vocabulary(held_out, start.config)
        _check_held_out(training, held_out)
    _check_step(recipe, training)
    rows = micro_batch_size(arguments, recipe)
    share: dict[str, Any] = {
        "data_parallel_rank": groups.data.rank,
        "data_parallel_size": groups.data.size,
        "attend_across_documents": not recipe.isolate_documents,
    }
    length = recipe.sequence_length
    return TrainingData(
        training,
        held_out,
        PackedBatches(training, length, rows, seed=recipe.seed, **share),
        None if held_out is None else EvaluationBatches(held_out, length, rows, **share),
        recipe.batch_size // (rows * groups.data.size),
    )


def _check_vocabulary(dataset: TokenizedDataset, config: ModelConfig) -> None:
    if dataset.highest_token_id >= config.vocab_size:
        raise RequestError(
            f"the tokenizer gave id {dataset.highest_token_id}, the model's vocabulary is {config.vocab_size}: "
            "they do not belong together"
        )


def _check_step(recipe: Recipe, training: TokenizedDataset) -> None:
    """Packing begins the data anew as often as a step needs."""
    tokens = recipe.batch_size * recipe.sequence_length
    if tokens > MOST_READS_A_STEP * training.num_tokens:
        raise RequestError(
            f"--batch-size {recipe.batch_size} times --sequence-length {recipe.sequence_length} is {tokens} tokens a "
            f"step, more than {MOST_READS_A_STEP} times the {training.num_tokens} to train on: make it smaller"
        )


def _check_held_out(training: TokenizedDataset, held_out: TokenizedDataset) -> None:
    """A loss on documents that are trained on as well says nothing of others."""
    shared = np.isin(held_out.documents["fingerprint"], training.documents["fingerprint"])
    if shared.any():
        first = int(held_out.document_numbers[shared.argmax()]) + 1
        raise RequestError(
            f"{int(shared.sum())} of the {held_out.num_documents} documents of --eval-data are in --data too, document "
            f"{first} first: take them out of one"
        )


def make_learner(recipe: Recipe, start: Start, groups: TrainingGroups, dtype: torch.dtype) -> Learner:
    """Model and optimiser as they are after `start.step` steps."""
    model = CausalLM(start.config, groups.tensor, dtype=parameter_dtype(dtype), device="meta")
    model.to_empty(device=groups.world.device)
    optimizer = adamw(
        model,
        learning_rate=recipe.learning_rate,
        betas=(recipe.beta1, recipe.beta2),
        eps=1e-8,
        weight_decay=recipe.weight_decay,
    )
    groups.together(lambda: _fill(model, optimizer, recipe, start))
    if dtype != parameter_dtype(dtype):
        compute_in(model, dtype)
    return Learner(model, optimizer, groups.data, max_grad_norm=recipe.max_grad_norm)


def compute_dtype(arguments: argparse.Namespace, saved: Mapping[str, Any] | None, device: torch.device) -> torch.dtype:
    """--dtype; else the resumed run's; else bfloat16 on GPUs, float32 on CPUs, most of which are slow at bfloat16.

    Raises:
        CheckpointError: the resumed run names another.
    """
    name = arguments.dtype or (saved or {}).get("dtype") or ("bfloat16" if device.type == "cuda" else "float32")
    if name not in COMPUTE_DTYPES:
        known = ", ".join(COMPUTE_DTYPES)
        raise CheckpointError(f"the run.json of the run to resume has dtype {name!r}: choose from {known}")
    return DTYPES[name]


def _fill(model: CausalLM, optimizer: torch.optim.AdamW, recipe: Recipe, start: Start) -> None:
    if start.step:
        assert start.source is not None
        CheckpointStore(Path(start.source).parent).load(start.step, model, optimizer)
    elif start.source is not None:
        with closing(open_checkpoint(start.source, model.group)) as checkpoint:
            checkpoint.load_into(model)
    else:
        initialise_parameters(model, recipe.seed, start.config.initializer_range)


def _start_from(source: str, world: TensorParallelGroup, step: int = 0, asked: ModelConfig | None = None) -> Start:
    """From a checkpoint; its configuration ends sequences as its generation does."""
    with closing(open_checkpoint(source, world)) as checkpoint:
        if asked is not None and _shape(asked) != _shape(checkpoint.config):
            raise RequestError(f"{source}, which the run resumes from, is another model than --model or --config says")
        tokenizer = work_together(world, lambda: checkpoint.tokenizer() if world.rank == 0 else None)
        eos = checkpoint.generation_eos_token_ids
    return Start(replace(checkpoint.config, eos_token_ids=eos), eos, tokenizer, source, step)


def _asked_config(arguments: argparse.Namespace, world: TensorParallelGroup) -> ModelConfig | None:
    if arguments.config:
        return read_config(arguments.config)
    if arguments.model:
        with closing(open_checkpoint(arguments.model, world)) as checkpoint:
            return checkpoint.config
    return None


def read_config(path: Path) -> ModelConfig:
    """The configuration in a config.json.

    Raises:
        RequestError: it cannot be read. ConfigError: it is not supported.
    """
    return ModelConfig.from_hf(read_object(path, RequestError))


def _shape(config: ModelConfig) -> ModelConfig:
    """What training leaves as it is."""
    return replace(config, vocab_size=1, bos_token_id=None, eos_token_ids=(), pad_token_id=None, dtype=None)


def _from_nothing(arguments: argparse.Namespace, recipe: Recipe) -> Start:
    """With a tokenizer of its own, whose ids of beginning and end the configuration takes over."""
    tokenizer = _new_tokenizer(arguments, recipe)
    eos = tokenizer.eos_token_id
    config = replace(
        read_config(arguments.config),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=() if eos is None else (eos,),
        pad_token_id=None,
    )
    if arguments.train_tokenizer:
        config = replace(config, vocab_size=len(tokenizer))
    return Start(config, config.eos_token_ids, tokenizer, None)


def _new_tokenizer(arguments: argparse.Namespace, recipe: Recipe) -> Any:
    if arguments.tokenizer is not None:
        return tokenizer_of_directory(Path(os.path.expanduser(arguments.tokenizer)))
    documents = list(read_documents(arguments.data))
    if recipe.eval_fraction is not None:
        documents, _ = split_documents(documents, recipe.eval_fraction, recipe.seed)
    return train_tokenizer((text for document in documents for text in _texts(document)), arguments.train_tokenizer)


def _texts(document: Document) -> list[str]:
    if isinstance(document, PlainText):
        return [document.text]
    if isinstance(document, PromptAndCompletion):
        return [document.prompt, document.completion]
    assert isinstance(document, Conversation)
    return [message["content"] for message in document.messages]
