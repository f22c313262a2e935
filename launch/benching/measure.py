"""Measures the cases of a sweep: all forms of a case in turns, beside what limits them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from launch.benching.amounts import amount_of, limit_of
from launch.benching.engines import Settings, Stage, contestants, request_of, stages
from launch.benching.rows import Measured, Row, Sample, rows_of
from launch.benching.subject import Subject
from launch.benching.sweep import OWN, Case, Form, Sweep
from launch.measurement.contestants import Field
from launch.measurement.engine.requests import MEMORY, Limit, RateRequest, TrainingAnswer, TrainingRequest
from launch.measurement.interleaving import Rounds, Turn, interleave
from launch.measurement.read_bandwidth import ReadBandwidth

RATE_S = 0.3
"""For which the rate of matrix products is measured."""
Result = Sample | float
"""What a turn gives: a form's sample, or the rate of what limits it."""


class Watcher(Protocol):
    """Who is told what goes on."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def turn(self, case: Case, turn: Turn[Result]) -> None:
        """After each measurement."""

    def rows(self, rows: Sequence[Row]) -> None:
        """Those of a case, once it is measured."""

    def failures(self, about: str, reasons: Mapping[str, str]) -> None:
        """Who has failed so far, by name; those that were told before included.

        Args:
            about: in what.
        """


def measure(sweep: Sweep, cases: Iterable[Case], subject: Subject, settings: Settings, watcher: Watcher) -> None:
    """Measures the cases.

    Raises:
        ContestantError: the memory readers could not run.
    """
    for stage, of_stage in stages(cases):
        _Measuring(sweep, subject, settings, watcher, stage).run(of_stage)


def turns_of(sweep: Sweep, cases: Iterable[Case], rounds: int) -> int:
    """How many measurements there are in all, where nobody fails."""
    degrees = len({form.tp_size for form in sweep.forms})
    return sum(rounds * (len(sweep.forms_of(case)) + degrees) for case in cases)


@dataclass
class _Measuring:
    """One stage."""

    sweep: Sweep
    subject: Subject
    settings: Settings
    watcher: Watcher
    stage: Stage

    def run(self, cases: Sequence[Case]) -> None:
        forms = [form for case in cases for form in self.sweep.forms_of(case)]
        with ExitStack() as stack:
            field = stack.enter_context(Field())
            loaded = contestants(forms, self.stage, self.sweep, self.subject, self.settings)
            field.load(loaded, self.watcher.say, self.settings.patience_s)
            self.watcher.failures(str(self.stage), field.failures)
            readers = self._readers(cases, field, stack)
            for case in cases:
                self.watcher.rows(self._rows(case, field, readers))

    def _readers(self, cases: Sequence[Case], field: Field, stack: ExitStack) -> dict[int, ReadBandwidth]:
        """Readers of a CPU's memory, by degree; GPUs are read by the ranks themselves."""
        if self.settings.device == "cuda" or all(limit_of(case) != MEMORY for case in cases):
            return {}
        shapes = {form.tp_size: form.threads for form in self.sweep.forms if form.contestant in field.facts}
        return {t: stack.enter_context(ReadBandwidth(t, threads)) for t, threads in shapes.items()}

    def _rows(self, case: Case, field: Field, readers: Mapping[int, ReadBandwidth]) -> list[Row]:
        forms = [form for form in self.sweep.forms_of(case) if form.contestant in field.facts]
        limits = self._limits(case, forms, field, readers)
        names = {t: f"{limit_of(case)} of t = {t}" for t in limits}
        actions: dict[str, Callable[[], Result]] = {
            **{form.name: partial(self._sample, case, form, field) for form in forms},
            **{names[t]: measure for t, measure in limits.items()},
        }
        rounds = interleave(
            actions,
            rounds=self.settings.rounds,
            warm_ups=self.settings.warm_ups,
            watch=partial(self.watcher.turn, case),
        )
        self.watcher.failures(str(self.stage), field.failures)
        lost = {name: why for name, why in rounds.failures.items() if why not in field.failures.values()}
        self.watcher.failures(str(case), lost)
        samples = {form: _samples(rounds, form.name) for form in forms if form.name in rounds.results}
        rates = {t: _rates(rounds, name) for t, name in names.items() if name in rounds.results}
        config, step_bytes = self.subject.config, self.subject.step_bytes(case.dtype)
        amounts = {form: amount_of(case, form, config, step_bytes) for form in samples}
        return rows_of(case, Measured(samples, limit_of(case), rates), amounts, config.num_layers)

    def _sample(self, case: Case, form: Form, field: Field) -> Sample:
        request, patience_s = request_of(case, form, self.subject.config.vocab_size), self.settings.patience_s
        if isinstance(request, TrainingRequest):
            return Sample.of(case, field.ask(form.contestant, request.line(), patience_s, TrainingAnswer.of_fields))
        return Sample.of(case, field.decode(form.contestant, request, patience_s))

    def _limits(
        self, case: Case, forms: Sequence[Form], field: Field, readers: Mapping[int, ReadBandwidth]
    ) -> dict[int, Callable[[], Result]]:
        """By degree, what measures the limit: on this project's processes, or on as many readers."""
        limit = limit_of(case)
        return {
            form.tp_size: readers[form.tp_size].bytes_per_second
            if limit == MEMORY and form.tp_size in readers
            else partial(self._rate, form.contestant, limit, field)
            for form in forms
            if form.system == OWN
        }

    def _rate(self, contestant: str, limit: Limit, field: Field) -> float:
        return field.ask(contestant, RateRequest(limit, RATE_S).line(), self.settings.patience_s, float)


def _samples(rounds: Rounds[Result], name: str) -> list[Sample]:
    return [result for result in rounds.results[name] if isinstance(result, Sample)]


def _rates(rounds: Rounds[Result], name: str) -> list[float]:
    return [result for result in rounds.results[name] if not isinstance(result, Sample)]
