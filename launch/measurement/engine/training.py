"""An optimiser step as `train` makes it, with the communicator's time in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from launch.measurement.engine.communication import Reading, of_all_ranks
from launch.measurement.engine.requests import TrainingAnswer, TrainingRequest
from launch.measurement.model_facts import config_of, is_config_alone

if TYPE_CHECKING:
    from tp.parallel.group import TensorParallelGroup
    from tp.training.data import TrainingBatch
    from tp.training.train_step import Learner

LEARNING_RATE = 0.0
"""The weights stay what they are, whatever number of steps is measured; the update is computed all the same."""
SEED = 0
"""Of the tokens."""


def make_training(source: str, dtype: str, group: TensorParallelGroup) -> Learner:
    """The model with the optimiser of `train`: float32 parameters, gradients and moments, computing in `dtype`."""
    from launch.training_recipe import Recipe
    from launch.training_setup import Start, make_learner
    from tp.generation.loading import as_dtype
    from tp.training.groups import TrainingGroups

    start = Start(config_of(source), (), None, None if is_config_alone(source) else source)
    return make_learner(Recipe(), start, TrainingGroups.of(group), as_dtype(dtype))


def train(learner: Learner, request: TrainingRequest, now: Callable[[], float] = time.perf_counter) -> TrainingAnswer:
    """Takes one step on random tokens. Every rank calls it, and all begin together."""
    from launch.arguments import layout_rule

    model = learner.model
    group = model.group
    model.model.choose_layout = layout_rule(request.layout)
    batch = random_batch(request, model.config.vocab_size)
    group.communicator.all_gather_object(None)
    _wait_for_device(group)
    before, began = Reading.of(group.communicator), now()
    report = learner.step([batch], LEARNING_RATE)
    _wait_for_device(group)
    seconds = now() - began
    taken = Reading.of(group.communicator).since(before)
    return TrainingAnswer(1e3 * seconds, report.loss, of_all_ranks(taken, group.communicator))


def random_batch(request: TrainingRequest, vocab_size: int) -> TrainingBatch:
    """The same tokens on every rank and at every degree; each token's label is the next one."""
    import torch

    from tp.training.data import TrainingBatch

    tokens = request.rows * request.row_tokens
    ids = torch.randint(vocab_size, (tokens + 1,), generator=torch.Generator().manual_seed(SEED))
    return TrainingBatch(ids[:-1], ids[1:], (request.row_tokens,) * request.rows)


def _wait_for_device(group: TensorParallelGroup) -> None:
    if group.device.type == "cuda":
        import torch

        torch.cuda.synchronize(group.device)
