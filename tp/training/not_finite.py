"""Where a loss or its gradient first stops being finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tp.models import CausalLM
from tp.models.first_non_finite import FirstNonFinite, FirstNonFiniteGradient, Place, first_of_all, in_words
from tp.models.taps import attached
from tp.parallel.group import TensorParallelGroup
from tp.training.data.packing import TrainingBatch
from tp.training.loss_module import LossModule

ROWS = 1024
"""Tokens whose logits are looked at at once."""
ADVICE = "lower the learning rate, or resume from the last checkpoint with other data"


def locate_non_finite(
    model: CausalLM,
    micro_batches: Sequence[tuple[TrainingBatch, int | None]],
    data_parallel: TensorParallelGroup,
    count: int,
) -> str:
    """In words, equal on all ranks, which all call it: the forwards once more, then, where they are finite and there
    are gradients, the backwards. Leaves no gradients.

    Args:
        micro_batches: this rank's, with their dropout seeds.
        count: labels by which the losses were divided.
    """
    groups = [model.group, data_parallel]
    place = first_of_all(_in_forwards(model, micro_batches), groups)
    if place is None and torch.is_grad_enabled():
        place = first_of_all(_in_backwards(model, micro_batches, count, data_parallel.size), groups)
    model.zero_grad(set_to_none=True)
    return in_words(place)


@torch.no_grad()
def _in_forwards(model: CausalLM, micro_batches: Sequence[tuple[TrainingBatch, int | None]]) -> Place | None:
    first = FirstNonFinite()
    with attached(model, first):
        for batch, seed in micro_batches:
            normed = model.model.final_norm(model.model(batch.step(seed)))
            for rows in torch.arange(len(batch.labels), device=batch.labels.device).split(ROWS):
                first.look_at_logits(model.lm_head(normed.select(rows)))
    return first.found


def _in_backwards(
    model: CausalLM, micro_batches: Sequence[tuple[TrainingBatch, int | None]], count: int, replicas: int
) -> Place | None:
    """Of the very loss that the step had: another's gradient may overflow elsewhere."""
    first = FirstNonFiniteGradient()
    loss_module = LossModule(model)
    with attached(model, first):
        for batch, seed in micro_batches:
            (loss_module(batch, count, seed) * replicas).backward()
    return first.found
