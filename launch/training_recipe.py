"""What determines the numbers of a training run: given on the command line, kept with every checkpoint."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from launch.arguments import positive
from tp.errors import CheckpointError, RequestError
from tp.json_objects import typed

if TYPE_CHECKING:
    from tp.training.schedule import CosineSchedule

COMPUTE_DTYPES = ("bfloat16", "float32", "float64")
"""Names of the dtypes that training computes in."""
LARGEST_COUNT = 2**31
RECIPE = "recipe"
"""Its key in the run.json of a checkpoint."""


@dataclass(frozen=True)
class Recipe:
    """The options that a resumed run must share with the run that it goes on with; in the order of the help.

    The values here are the defaults. `final_learning_rate` is a tenth of the highest, `warmup_steps` a tenth of the
    steps, at most 100, where they are not given.
    """

    sequence_length: int = 512
    batch_size: int = 16
    steps: int = 1000
    learning_rate: float = 3e-4
    final_learning_rate: float = 3e-5
    warmup_steps: int = 100
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    seed: int = 0
    isolate_documents: bool = False
    eval_fraction: float | None = None

    @classmethod
    def of(cls, arguments: argparse.Namespace, saved: Mapping[str, Any] | None = None) -> Recipe:
        """What the user gave; else what the checkpoint that is resumed from has; else the default.

        Raises:
            RequestError: a value out of range, or one that differs from the checkpoint's.
        """
        given = {f.name: getattr(arguments, f.name) for f in fields(cls) if getattr(arguments, f.name) is not None}
        if saved is not None:
            _check_same(given, saved)
            return cls.from_json(saved)
        rate, steps = given.get("learning_rate", cls.learning_rate), given.get("steps", cls.steps)
        derived = {"final_learning_rate": rate / 10, "warmup_steps": min(100, steps // 10)}
        recipe = cls(**{**derived, **given})
        recipe._check()
        return recipe

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Recipe:
        """From what `to_json` gave.

        Raises:
            CheckpointError: fields are missing, unknown, of another type or out of range.
        """
        try:
            recipe = typed(cls, saved, "recipe")
            if missing := [field.name for field in fields(cls) if field.name not in saved]:
                raise ValueError(f"recipe has no {missing[0]}")
            recipe._check()
        except (ValueError, RequestError) as error:
            raise CheckpointError(f"the checkpoint's run.json cannot be resumed: {error}") from error
        return recipe

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def schedule(self) -> CosineSchedule:
        """The learning rate of each step.

        Raises:
            RequestError: rates or warm-up out of range.
        """
        from tp.training.schedule import CosineSchedule

        return CosineSchedule(self.learning_rate, self.final_learning_rate, self.warmup_steps, self.steps)

    def _check(self) -> None:
        self.schedule()
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise RequestError(f"--{name} {getattr(self, name)} is outside 0..1")
        for name in ("learning_rate", "weight_decay", "max_grad_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                raise RequestError(f"{_option(name)} {getattr(self, name)} is negative or no number")
        for name in ("sequence_length", "batch_size", "steps"):
            if not 0 < getattr(self, name) < LARGEST_COUNT:
                raise RequestError(f"{_option(name)} {getattr(self, name)} is outside 1..2^31")
        if not 0 <= self.seed < 2**63:
            raise RequestError(f"--seed {self.seed} is outside 0..2^63")
        if self.eval_fraction is not None and not 0 < self.eval_fraction < 1:
            raise RequestError(f"--eval-fraction {self.eval_fraction} must lie between 0 and 1")


def add_recipe_options(parser: argparse.ArgumentParser) -> None:
    """Batches and optimiser. None stands for what is not given: then a resumed run has its checkpoint's value."""
    batches = parser.add_argument_group("batches")
    _add(batches, "sequence_length", positive, "L", "tokens a row")
    _add(batches, "batch_size", positive, "N", "rows of the global batch: of one optimiser step")
    batches.add_argument("--micro-batch-size", type=positive, metavar="N", help="rows at once on a rank (default: all)")
    batches.add_argument(
        "--isolate-documents", action="store_true", default=None, help="no attention from one document to another"
    )
    optimizer = parser.add_argument_group("optimiser (AdamW; linear warm-up, then a cosine)")
    _add(optimizer, "steps", positive, "N", "of the whole run")
    _add(optimizer, "learning_rate", float, "X", "the highest")
    optimizer.add_argument("--final-learning-rate", type=float, metavar="X", help="default: a tenth of the highest")
    optimizer.add_argument("--warmup-steps", type=int, metavar="N", help="default: a tenth of the steps, at most 100")
    _add(optimizer, "weight_decay", float, "X", "of matrices")
    _add(optimizer, "beta1", float, "X", "of the first moment")
    _add(optimizer, "beta2", float, "X", "of the second moment")
    _add(optimizer, "max_grad_norm", float, "X", "longer gradients are scaled down to this norm")
    _add(optimizer, "seed", int, "N", "of initial weights, order of documents, dropout")


def _add(group: argparse._ArgumentGroup, name: str, kind: Any, metavar: str, text: str) -> None:
    default = f"{text} (default {getattr(Recipe, name):g})"
    group.add_argument(_option(name), type=kind, metavar=metavar, help=default)


def _check_same(given: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if saved.get(name) != value:
            raise RequestError(
                f"{_option(name)} {value} differs from the {saved.get(name)} of the run to resume: leave it out, or "
                "start a run with another --output"
            )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
