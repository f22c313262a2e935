"""Prefill and decode of several contestants in turns, each beside the memory read bandwidth at that moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from launch.measurement.cases import Case
from launch.measurement.contestants import Contestant, Field
from launch.measurement.interleaving import WARM_UP, Rounds, Turn, interleave
from launch.measurement.model_facts import ModelFacts
from launch.measurement.read_bandwidth import ReadBandwidth
from launch.measurement.requests import random_request
from launch.measurement.rows import Row, Served, row


@dataclass(frozen=True)
class Comparison:
    """What came out.

    Attributes:
        rows: one for each case and contestant that lasted through it.
        failures: by contestant that did not start or did not last, the reason in one line.
    """

    rows: tuple[Row, ...]
    failures: Mapping[str, str]


def compare(
    contestants: Sequence[Contestant],
    cases: Sequence[Case],
    facts: ModelFacts,
    *,
    rounds: int,
    timeout_s: float,
    watch: Callable[[str], None],
) -> Comparison:
    """Loads all contestants, then measures each case in rounds, after a warm-up of its own.

    Args:
        rounds: that count.
        timeout_s: for loading a contestant, and for each request.
        watch: told what goes on, in one line each time.

    Raises:
        ContestantError: the memory readers could not start.
    """
    rows: list[Row] = []
    with ExitStack() as stack:
        field = stack.enter_context(Field())
        field.load(contestants, watch, timeout_s)
        shapes = sorted({(c.processes, c.threads) for c in contestants if c.name not in field.failures})
        readers = {shape: stack.enter_context(ReadBandwidth(*shape)) for shape in shapes}
        for case in cases:
            present = [c for c in contestants if c.name not in field.failures]
            measured = _measure(case, field, present, readers, facts, rounds, timeout_s, watch)
            rows += [row(case, c, measured.results, facts) for c in present if c.name in measured.results]
            field.failures.update(measured.failures)
        return Comparison(tuple(rows), dict(field.failures))


def _measure(
    case: Case,
    field: Field,
    contestants: Sequence[Contestant],
    readers: Mapping[tuple[int, int], ReadBandwidth],
    facts: ModelFacts,
    rounds: int,
    timeout_s: float,
    watch: Callable[[str], None],
) -> Rounds[Served]:
    request = random_request(case.batch, case.prompt_tokens, case.new_tokens, facts.vocab_size)

    def serve(contestant: Contestant) -> Served:
        read = readers[contestant.processes, contestant.threads].bytes_per_second
        before = read()
        answer = field.decode(contestant.name, request, timeout_s)
        return Served(answer, (before + read()) / 2)

    actions = {contestant.name: partial(serve, contestant) for contestant in contestants}
    return interleave(actions, rounds=rounds, watch=lambda turn: watch(_progress_line(case, turn)))


def _progress_line(case: Case, turn: Turn[Served]) -> str:
    when = "warm-up" if turn.round == WARM_UP else f"round {turn.round} of {turn.rounds}"
    answer = turn.result.answer
    if case.phase == "prefill":
        what = f"{answer.ttft_ms:.1f} ms"
    else:
        what = f"{answer.tpot_ms:.1f} ms a token, {answer.tokens_per_s:.1f} tokens/s"
    return f"{case}: {when}: {turn.contestant}: {what}, beside reads at {turn.result.read_bytes_per_s / 1e9:.1f} GB/s"
