"""A training run on one rank, from its options to its last checkpoint."""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from launch.arguments import layout_rule
from launch.output_files import check_directory
from launch.rank_process import end_at_once
from launch.stop_request import StopRequest
from launch.terminal import Terminal
from launch.training_check import check, saved_run
from launch.training_memory import check_step_fits
from launch.training_progress import Speed, TrainingDisplay
from launch.training_recipe import RECIPE, Recipe
from launch.training_setup import Start, TrainingData, compute_dtype, find_start, load_data, make_learner
from tp.errors import RequestError
from tp.parallel.agreement import check_alike, statement_of
from tp.parallel.group import TensorParallelGroup
from tp.training.activation_checkpointing import checkpoint_layers
from tp.training.groups import TrainingGroups
from tp.training.metrics import MetricsLog, bits_per_byte, plot_metrics, read_metrics
from tp.training.store import CheckpointStore
from tp.training.train_step import Learner
from tp.training.trainer import EvaluationMetrics, StepMetrics, Trainer, TrainingSchedule

METRICS, PLOT = "metrics.jsonl", "loss.png"


@dataclass(frozen=True)
class _Prepared:
    """What a run trains, from where on, with what.

    Attributes:
        about: what its checkpoints say of it beside the recipe.
        resumes: a checkpoint was found to go on from.
    """

    recipe: Recipe
    groups: TrainingGroups
    start: Start
    data: TrainingData
    learner: Learner
    about: dict[str, Any]
    resumes: bool


def run(arguments: argparse.Namespace, world: TensorParallelGroup, terminal: Terminal) -> None:
    """Trains, on every rank; rank 0 tells what there is to tell."""
    with StopRequest(arguments.grace, lambda: _give_up(arguments.grace)) as stop_requested:
        prepared = _prepare(arguments, world, terminal)
        summary = _train(arguments, prepared, world, terminal, stop_requested)
        if summary is not None and arguments.json:
            terminal.show(json.dumps(summary) + "\n")


def _prepare(arguments: argparse.Namespace, world: TensorParallelGroup, terminal: Terminal) -> _Prepared:
    """Everything that can be refused is, on all ranks together, what costs least first."""
    world.agree(lambda: _check(arguments) if world.rank == 0 else None)
    saved = world.communicator.all_gather_object(saved_run(arguments) if world.rank == 0 else None)[0]
    recipe = Recipe.of(arguments, None if saved is None else saved[RECIPE])
    dtype = compute_dtype(arguments, saved, world.device)
    check_alike(world.communicator, {**statement_of("recipe", recipe), **_statement(arguments, dtype)})
    groups = TrainingGroups.of(world, arguments.dp)
    start = find_start(arguments, recipe, world)
    check_step_fits(arguments, recipe, start.config, groups, dtype)
    data = load_data(arguments, recipe, start, groups, terminal)
    about = {"data": data.fingerprint(), "dtype": str(dtype).removeprefix("torch.")}
    check_alike(world.communicator, {"the tokens of --data": about["data"]})
    _check_data(about, saved)
    learner = make_learner(recipe, start, groups, dtype)
    learner.model.model.choose_layout = layout_rule(arguments.sequence_parallel)
    if arguments.activation_checkpointing:
        checkpoint_layers(learner.model)
    return _Prepared(recipe, groups, start, data, learner, about, saved is not None)


def _train(
    arguments: argparse.Namespace,
    prepared: _Prepared,
    world: TensorParallelGroup,
    terminal: Terminal,
    stop_requested: Callable[[], bool],
) -> dict[str, Any] | None:
    """The run's summary, on rank 0."""
    recipe, groups, start, data = prepared.recipe, prepared.groups, prepared.start, prepared.data
    model, optimizer = prepared.learner.model, prepared.learner.optimizer
    assert isinstance(optimizer, torch.optim.AdamW)  # whose state the store knows
    store = CheckpointStore(arguments.output, arguments.keep)
    speed = Speed.of(start.config, recipe.sequence_length, recipe.batch_size, world.device, world.size)
    with TrainingDisplay(terminal, speed, start.step, recipe.steps) as display:
        report = _Report(arguments, display, speed, data, start.step) if world.rank == 0 else None
        if arguments.resume and report is not None:
            store.clear_leftovers()
            found = (
                f"from step {start.step}" if prepared.resumes else f"no checkpoint in {arguments.output}: from step 0"
            )
            display.say(found)

        def save(done: int) -> None:
            content = {RECIPE: recipe.to_json(), **prepared.about}
            groups.on_first_replica(lambda: store.save(done, model, optimizer, start.tokenizer, content))
            if report is not None:
                report.saved(store.path_of(done))

        trainer = Trainer(
            prepared.learner,
            groups.control,
            learning_rate=recipe.schedule(),
            batches=data.of_step,
            evaluation=data.evaluation,
            schedule=TrainingSchedule(recipe.steps, arguments.evaluate_every, arguments.save_every),
            save=save,
            on_metrics=report.metrics if report is not None else lambda metrics: None,
            stop_requested=stop_requested,
            dropout_seed=recipe.seed,
        )
        done = trainer.run(start.step)
    return None if report is None else report.finish(done, recipe.steps)


class _Report:
    """What rank 0 tells while a run goes on: to the terminal, to the metrics file, and at last as one object."""

    def __init__(
        self, arguments: argparse.Namespace, display: TrainingDisplay, speed: Speed, data: TrainingData, step: int
    ) -> None:
        self._output: Path = arguments.output
        self._every: int = arguments.log_every
        self._display = display
        self._speed = speed
        self._held_out_bytes = data.held_out.num_bytes if data.held_out is not None else 0
        self._log = MetricsLog(self._output / METRICS, step)
        self._first_step = step
        self._step_seconds = 0.0
        self._began = time.perf_counter()
        self._summary: dict[str, Any] = {"output": str(self._output), "checkpoint": None}

    def metrics(self, metrics: StepMetrics | EvaluationMetrics) -> None:
        record = metrics.to_json()
        if isinstance(metrics, StepMetrics):
            self._step_seconds += metrics.seconds
            self._display.step(metrics)
            self._summary["loss"] = metrics.loss
            if metrics.step % self._every == 0:
                self._log.append(record | self._speed.rates(metrics.seconds))
            return
        record["bits_per_byte"] = bits_per_byte(metrics.loss, metrics.tokens, self._held_out_bytes)
        self._summary["evaluation"] = record
        self._log.append(record)
        self._plot()
        self._display.say(
            f"step {metrics.step}: evaluation loss {metrics.loss:.4f}, perplexity {metrics.perplexity:.4g}, "
            f"{record['bits_per_byte']:.4f} bits per byte"
        )

    def saved(self, path: Path) -> None:
        self._summary["checkpoint"] = str(path)
        self._display.say(f"saved {path}")

    def finish(self, done: int, total: int) -> dict[str, Any]:
        """The summary of the run, once it is over."""
        self._log.close()
        self._plot()
        steps = done - self._first_step
        rates = self._speed.rates(self._step_seconds / steps) if steps else {}
        seconds = time.perf_counter() - self._began
        self._display.say(f"{done} of {total} steps done")
        return {**self._summary, "steps": done, "complete": done == total, "seconds": seconds, **rates}

    def _plot(self) -> None:
        records = read_metrics(self._output / METRICS)
        if records:
            plot_metrics(records, self._output / PLOT)


def _statement(arguments: argparse.Namespace, dtype: torch.dtype) -> dict[str, str]:
    """What ranks of one run must share beside the recipe, from start to end or in every collective."""
    return {"--dtype": str(dtype)} | {
        f"--{name.replace('_', '-')}": str(getattr(arguments, name))
        for name in ("dp", "sequence_parallel", "activation_checkpointing", "resume")
    }


def _check(arguments: argparse.Namespace) -> None:
    """On rank 0 alone, whose machine is the one that is written to."""
    check(arguments)
    check_directory("--output", arguments.output)


def _check_data(about: dict[str, Any], saved: Any) -> None:
    if saved is not None and saved.get("data") != about["data"]:
        raise RequestError(
            f"--data (fingerprint {about['data']}) is not what the run to resume was trained on "
            f"({saved.get('data')}): give the same files in the same order"
        )


def _give_up(grace_s: float) -> None:
    end_at_once(
        f"SIGTERM came {grace_s:g} s ago and the checkpoint is not complete: the one before it stands; --grace gives "
        "more time",
        128 + signal.SIGTERM,
    )
