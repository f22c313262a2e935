"""Which processes a sweep needs, and what they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from launch.benching.subject import Subject
from launch.benching.sweep import OWN, Case, Form, Sweep, work_of
from launch.measurement.contestants import Contestant
from launch.measurement.engine.requests import TrainingRequest
from launch.measurement.lineup import PEERS
from launch.measurement.peers import own, own_training
from launch.measurement.peers.task import Task
from launch.measurement.requests import DecodeRequest, random_request

LAYOUT_RULES = {"replicate": "off", "sharded": "on", None: "off"}
"""Values of --sequence-parallel. At t = 1 the layouts are the same."""


@dataclass(frozen=True)
class Settings:
    """How the cases are measured.

    Attributes:
        rounds: that count, after `warm_ups` that do not.
        patience_s: for loading a contestant, and for each request.
        device, backend: as the options of the commands.
        gguf: the model for llama.cpp.
    """

    rounds: int
    warm_ups: int
    patience_s: float
    device: str
    backend: str
    gguf: str | None = None


@dataclass(frozen=True)
class Stage:
    """What has processes of its own: serving, or training, in one dtype. Stages come one after the other."""

    dtype: str
    trains: bool

    @classmethod
    def of(cls, case: Case) -> Stage:
        return cls(case.dtype, case.phase == "train")

    def __str__(self) -> str:
        return f"{'training' if self.trains else 'serving'} in {self.dtype}"


def stages(cases: Iterable[Case]) -> list[tuple[Stage, list[Case]]]:
    """The cases by stage, in their order."""
    return [(stage, list(of_stage)) for stage, of_stage in groupby(cases, key=Stage.of)]


def contestants(
    forms: Sequence[Form], stage: Stage, sweep: Sweep, subject: Subject, settings: Settings
) -> list[Contestant]:
    """The processes of the forms; layouts of one degree share theirs."""
    batch, tokens = sweep.largest()
    task = Task(subject.source, stage.dtype, batch, tokens, settings.gguf, settings.device, settings.backend)
    make = {OWN: own_training.contestant if stage.trains else own.contestant, **PEERS}
    by_name = {form.contestant: form for form in forms}
    return [make[form.system](task, form.tp_size, form.threads) for form in by_name.values()]


def request_of(case: Case, form: Form, vocab_size: int) -> DecodeRequest | TrainingRequest:
    """What a form is asked for in a case: the same prompts for all that have as many."""
    batch, tokens = work_of(case, form)
    layout = LAYOUT_RULES[form.layout]
    if case.phase == "train":
        return TrainingRequest(batch, tokens, layout)
    drawn = random_request(batch, tokens, case.new_tokens, vocab_size)
    return DecodeRequest(drawn.prompt_ids, drawn.new_tokens, layout)
