"""Whether a step of a training run fits in the memory of every rank, asked before data and weights are read."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from launch.training_check import micro_batch_size
from launch.training_recipe import Recipe
from tp.checkpoint.free_memory import free_memory
from tp.checkpoint.memory import largest, mebibytes, weight_bytes
from tp.config import ModelConfig
from tp.errors import CapacityError, RequestError
from tp.models import CausalLM
from tp.planning.memory import training_memory
from tp.planning.parameters import rank_models
from tp.planning.precision import Precision
from tp.training.groups import TrainingGroups

BYTES_A_WEIGHT_BYTE = 3
"""A parameter and both moments of AdamW, all of one dtype; its gradient is apart."""
BYTES_A_TOKEN = 24
"""Of a step, on the device: its id, and its label twice."""


@dataclass(frozen=True)
class _Needs:
    """Of one rank, in bytes.

    Attributes:
        parameters: with moments.
        tokens: of the whole step.
        passes: gradients, and activations of the rows that are in memory at once, as the planner counts them.
        free: what the rank may take.
        most_rows: that there is room for at once.
    """

    parameters: int
    tokens: int
    passes: int
    free: int
    most_rows: int


def check_step_fits(
    arguments: argparse.Namespace, recipe: Recipe, config: ModelConfig, groups: TrainingGroups, dtype: torch.dtype
) -> None:
    """Compares what a step takes with what is free. Every rank calls it, before it allocates.

    Raises:
        RequestError: rows are longer than the model's context.
        CapacityError: too little on some rank; on all ranks together, with the rows at once that fit.
    """
    if recipe.sequence_length > config.longest_context:
        raise RequestError(
            f"--sequence-length {recipe.sequence_length} is beyond the model's context, {config.longest_context}"
        )
    rows = micro_batch_size(arguments, recipe)
    needs = _needs(arguments, recipe, config, groups, dtype, rows)
    of_ranks: list[_Needs] = groups.world.communicator.all_gather_object(needs)
    most_rows = min(each.most_rows for each in of_ranks)
    for rank, each in enumerate(of_ranks):
        if each.most_rows < rows:
            raise CapacityError(
                f"rank {rank} needs {mebibytes(each.parameters)} for parameters and moments, "
                f"{mebibytes(each.tokens)} for the tokens of a step and {mebibytes(each.passes)} for gradients and "
                f"activations of {rows} x {recipe.sequence_length} tokens at once, {mebibytes(each.free)} is free: "
                f"{_remedy(arguments, rows, most_rows)}"
            )


def parameter_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the parameters, where `dtype` is computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _needs(
    arguments: argparse.Namespace,
    recipe: Recipe,
    config: ModelConfig,
    groups: TrainingGroups,
    dtype: torch.dtype,
    rows: int,
) -> _Needs:
    group, length = groups.tensor, recipe.sequence_length
    model = CausalLM(config, group, dtype=parameter_dtype(dtype), device="meta")
    planned = rank_models(config, Precision.of(str(dtype).removeprefix("torch.")), group.size)[group.rank]
    sharded = arguments.sequence_parallel != "off" and group.size > 1

    def passes(rows: int) -> int:
        memory = training_memory(
            planned, group.rank, group.device.type, 0,
            batch=rows, context=length, sharded=sharded, recomputed=arguments.activation_checkpointing,
        )  # fmt: skip
        alone = rows == recipe.batch_size  # gradients come as activations go; else those of other rows are there
        return max(gradients, memory.activations) if alone else gradients + memory.activations

    gradients = weight_bytes(model)
    parameters = BYTES_A_WEIGHT_BYTE * gradients
    tokens = BYTES_A_TOKEN * length * recipe.batch_size // groups.data.size
    free = free_memory(groups.world)
    room = free - parameters - tokens
    fitting = rows if passes(rows) <= room else largest(lambda few: passes(few) <= room, rows - 1)
    return _Needs(parameters, tokens, passes(rows), free, fitting)


def _remedy(arguments: argparse.Namespace, rows: int, most_rows: int) -> str:
    if most_rows:
        fits = next(few for few in range(most_rows, 0, -1) if rows % few == 0)
        return f"there is room for --micro-batch-size {fits}"
    checkpointing = "" if arguments.activation_checkpointing else ", --activation-checkpointing"
    return f"use more ranks{checkpointing}, or a smaller --batch-size or --sequence-length"
