"""Chrome traces of every rank, in processes that are started for them: what is profiled is not what is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launch.benching.engines import Settings, contestants, request_of, stages
from launch.benching.measure import Watcher
from launch.benching.subject import Subject
from launch.benching.sweep import OWN, Case, Form, Sweep
from launch.measurement.contestants import Field
from launch.measurement.engine.requests import TraceRequest
from launch.measurement.errors import ContestantError
from launch.measurement.requests import DecodeRequest

TRACED_STEPS = 3
"""Decode steps in a trace."""


def trace(sweep: Sweep, subject: Subject, settings: Settings, directory: Path, watcher: Watcher) -> None:
    """Traces the first case of each phase and dtype, at every degree and in every layout."""
    for stage, cases in stages(sweep.cases()):
        firsts = {case.phase: case for case in reversed(cases)}
        with Field() as field:
            field.load(contestants(sweep.forms, stage, sweep, subject, settings), watcher.say, settings.patience_s)
            for case in reversed(firsts.values()):
                _trace_case(case, sweep.forms, field, subject, settings, directory, watcher)
            watcher.failures(f"traces of {stage}", field.failures)


def trace_name(case: Case, form: Form) -> str:
    """What the names of its files begin with."""
    layout = "" if form.layout is None else f"-{form.layout}"
    return f"{case.phase}-{case.dtype}-tp-{form.tp_size}{layout}"


def _trace_case(
    case: Case,
    forms: Sequence[Form],
    field: Field,
    subject: Subject,
    settings: Settings,
    directory: Path,
    watcher: Watcher,
) -> None:
    for form in forms:
        assert form.system == OWN
        request = request_of(case, form, subject.config.vocab_size)
        if isinstance(request, DecodeRequest):
            request = replace(request, new_tokens=min(request.new_tokens, 1 + TRACED_STEPS))
        asked = TraceRequest(request, str(directory.resolve()), trace_name(case, form))
        try:
            field.ask(form.contestant, asked.line(), settings.patience_s, str)
        except ContestantError:
            continue  # the field keeps the reason
        watcher.say(f"written: {directory / asked.name}-rank-*.json")
