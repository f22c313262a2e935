"""A training run: steps, evaluations and checkpoints, ended by its last step or by a request to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tp.errors import NumericalError
from tp.models.description import statement_of_model
from tp.parallel.agreement import check_alike, statement_of
from tp.parallel.group import TensorParallelGroup
from tp.training.data.packing import TrainingBatch
from tp.training.same_batches import check_same_batches
from tp.training.schedule import CosineSchedule
from tp.training.train_step import Learner

BatchesOfStep = Callable[[int], Sequence[TrainingBatch]]
"""This data-parallel rank's micro-batches of a step: a function of the step alone, so that resuming is exact."""

SaveCheckpoint = Callable[[int], None]
"""Called on every rank with the number of steps that the checkpoint has behind it."""


@dataclass(frozen=True)
class StepMetrics:
    """One step, as it is logged.

    Attributes:
        step: steps done, this one included.
        loss: nats a label, of the whole global batch.
        grad_norm: before clipping.
        learning_rate: of this step.
        tokens: labels trained on in this step, all ranks.
        seconds: of this step on this rank.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {"kind": "step", **asdict(self)}


@dataclass(frozen=True)
class EvaluationMetrics:
    """An evaluation on held-out documents after `step` steps: mean nats a label, over `tokens` labels."""

    step: int
    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "evaluation", **asdict(self), "perplexity": self.perplexity}


@dataclass(frozen=True)
class TrainingSchedule:
    """When a run does what, in steps; 0 = never, but for the last step."""

    total_steps: int
    evaluate_every: int = 0
    save_every: int = 0


class Trainer:
    """Runs a `Learner` over batches.

    Args:
        learner: model and optimiser.
        world: all ranks of the run; a request to stop on any of them is everyone's.
        learning_rate: by step.
        batches: this rank's micro-batches of a step.
        evaluation: this rank's held-out batches, gone through each time; None = no evaluation.
        schedule: when to evaluate and save.
        save: writes a checkpoint.
        on_metrics: sees every step and evaluation, on every rank.
        stop_requested: asked after each step and evaluation batch; True on any rank saves and ends the run.
        dropout_seed: masks of step s come from dropout_seed + s.
    """

    def __init__(
        self,
        learner: Learner,
        world: TensorParallelGroup,
        *,
        learning_rate: CosineSchedule,
        batches: BatchesOfStep,
        evaluation: Iterable[TrainingBatch] | None,
        schedule: TrainingSchedule,
        save: SaveCheckpoint,
        on_metrics: Callable[[StepMetrics | EvaluationMetrics], None] = lambda metrics: None,
        stop_requested: Callable[[], bool] = lambda: False,
        dropout_seed: int = 0,
    ) -> None:
        self.learner = learner
        self.world = world
        self.learning_rate = learning_rate
        self.batches = batches
        self.evaluation = evaluation
        self.schedule = schedule
        self.save = save
        self.on_metrics = on_metrics
        self.stop_requested = stop_requested
        self.dropout_seed = dropout_seed

    def run(self, first_step: int = 0) -> int:
        """Trains from step `first_step` on; returns the number of steps that are done.

        Raises:
            NumericalError: a loss or the gradient is not finite; on all ranks together, nothing saved.
            CommunicationError: ranks whose models, schedules or micro-batches differ; on all ranks together.
        """
        check_alike(self.world.communicator, {"first step": str(first_step), **self._statement()})
        total = self.schedule.total_steps
        for step in range(first_step, total):
            self._train(step)
            done = step + 1
            stopping = self._somebody_asked_to_stop()
            if not stopping and (done == total or _is_due(done, self.schedule.evaluate_every)):
                stopping = self._evaluate(done)
            if done == total or stopping or _is_due(done, self.schedule.save_every):
                self.save(done)
            if stopping:
                return done
        return max(first_step, total)

    def _statement(self) -> dict[str, str]:
        return {
            **statement_of_model(self.learner.model),
            **statement_of("schedule", self.schedule),
            **statement_of("learning rate", self.learning_rate),
            "optimizer": str([_without_parameters(group) for group in self.learner.optimizer.param_groups]),
            "gradient norm clipped to": str(self.learner.max_grad_norm),
            "dropout seed": str(self.dropout_seed),
        }

    def _train(self, step: int) -> None:
        began = time.perf_counter()
        rate = self.learning_rate(step)
        seed = (self.dropout_seed + step) << 20  # room for the micro-batches of a step
        batches = self.batches(step)
        check_same_batches(batches, self.learner.model.group)
        try:
            report = self.learner.step(batches, rate, seed)
        except NumericalError as error:
            raise NumericalError(f"step {step + 1}: {error}") from error
        seconds = time.perf_counter() - began
        self.on_metrics(StepMetrics(step + 1, report.loss, report.grad_norm, rate, report.num_labels, seconds))

    def _evaluate(self, done: int) -> bool:
        """Evaluates; True where a request to stop broke it off, which is then not reported."""
        if self.evaluation is None:
            return False
        stopping = False

        def until_stopped(batches: Iterable[TrainingBatch]) -> Iterator[TrainingBatch]:
            nonlocal stopping
            for batch in batches:
                if stopping := self._somebody_asked_to_stop():
                    return
                yield batch

        loss, count = self.learner.evaluate(until_stopped(self.evaluation))
        if not stopping:
            self.on_metrics(EvaluationMetrics(done, loss, count))
        return stopping

    def _somebody_asked_to_stop(self) -> bool:
        asked = torch.tensor(float(self.stop_requested()), device=self.world.device)
        return self.world.communicator.all_reduce(asked).item() > 0


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _is_due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
