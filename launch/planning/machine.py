"""Timing this machine: collectives by size, and small models at every degree, all of them in turns."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from launch.measurement.cases import Case
from launch.measurement.child import Child, Command
from launch.measurement.command_line import tell
from launch.measurement.contestants import Contestant, Field
from launch.measurement.errors import ContestantError
from launch.measurement.interleaving import WARM_UP, Turn, interleave
from launch.measurement.model_facts import text_of_config
from launch.measurement.peers import own
from launch.measurement.peers.task import Task
from launch.measurement.read_bandwidth import ReadBandwidth
from launch.measurement.requests import DecodeAnswer, random_request
from launch.measurement.spread import Spread, middle_mean
from launch.planning.synthetic import CASES, CONFIGS
from launch.process_guard import ProcessGuard
from tp.cores import own_cores
from tp.defaults import PREFILL_CHUNK
from tp.planning.calibration import Observation
from tp.planning.fitting import fit_line
from tp.planning.hardware import MeasuredCollective

ROUNDS = 5
"""That count; one before them warms up."""
WAKING_TOKENS = 64
"""Of a prompt that goes before each request: the first after a pause is slower."""
TURNS = {"prefill": 1, "decode": 2}
"""Of a case in a round: decode is short, and lives on the memory, whose rate changes from moment to moment."""
PATIENCE_S = 600.0
RANK_MODULE = "launch.planning.rank_measurements"
Measured = DecodeAnswer | float
"""A contestant's answer, or the bytes a second that readers read."""


@dataclass(frozen=True)
class Subject:
    """A model to time.

    Attributes:
        name: in what is told, and in the results.
        model: what a contestant loads: a directory, or a configuration as text.
        vocab_size: token ids of its prompts.
        cases: what is timed of it.
    """

    name: str
    model: str
    vocab_size: int
    cases: tuple[Case, ...]


SYNTHETIC = tuple(
    Subject(name, text_of_config(config), config.vocab_size, CASES[name]) for name, config in CONFIGS.items()
)
"""The models that rates are fitted to."""


@dataclass
class Measurements:
    """Everything that was measured.

    Attributes:
        answers: of every counted round, by the subject's name, degree and case.
        read_gb_per_s: by degree, of plain memory reads by as many processes and threads.
        collectives: of all degrees above 1.
        runtime_bytes: of a rank.
    """

    answers: dict[tuple[str, int, Case], list[DecodeAnswer]] = field(default_factory=dict)
    read_gb_per_s: dict[int, float] = field(default_factory=dict)
    collectives: list[MeasuredCollective] = field(default_factory=list)
    runtime_bytes: int = 0

    @property
    def degrees(self) -> list[int]:
        return sorted({degree for _, degree, _ in self.answers})

    def observations(self, degree: int) -> list[Observation]:
        """Of the synthetic models."""
        return [
            each
            for (name, at, case), answers in self.answers.items()
            if at == degree and name in CONFIGS
            for each in observations(name, case, answers)
        ]


def measure_ranks(degree: int, measured: Measurements) -> None:
    """Collectives, and the size of a process.

    Raises:
        ContestantError: a rank did not start, or did not come to its end.
    """
    launched = ["launch", "run", "--nproc", str(degree), "-m"] if degree > 1 else []
    command = Command([sys.executable, "-m", *launched, RANK_MODULE], {"OMP_NUM_THREADS": str(_cores_of(degree))})
    ranks = f"{degree} rank{'s' if degree > 1 else ''}"
    with ProcessGuard() as guard, closing(Child(command, guard)) as child:
        try:
            facts = child.wait_until_ready(PATIENCE_S)
        except ContestantError as error:
            raise ContestantError(f"measuring {ranks}: {error}") from error
    measured.runtime_bytes = max(measured.runtime_bytes, facts["runtime_bytes"])
    for operation, times in facts["collectives"].items():
        line = fit_line([int(nbytes) for nbytes in times], list(times.values()))
        measured.collectives.append(MeasuredCollective(operation, degree, "measured", line))
    tell(f"{ranks}: a process and its libraries take {facts['runtime_bytes'] / 1e6:,.0f} MB")


def measure_models(
    degrees: Sequence[int], dtype: str, subjects: Sequence[Subject], measured: Measurements, rounds: int = ROUNDS
) -> None:
    """Every case of every model at every degree, as often a round as `TURNS` says, in an order that mixes them.

    So all of them meet the machine as it is by then, and no slow minute falls on one model's cases alone.
    """
    with ExitStack() as stack:
        actions: dict[str, Callable[[], Measured]] = {}
        about: dict[str, tuple[str, int, Case]] = {}
        for subject in subjects:
            contestants = [_contestant(subject.model, dtype, degree) for degree in degrees]
            field = stack.enter_context(Field())
            field.load(contestants, _teller_of(subject.name))
            for degree, contestant in zip(degrees, contestants, strict=True):
                if contestant.name in field.failures:
                    raise ContestantError(f"{contestant.name}: {field.failures[contestant.name]}")
                for case in subject.cases:
                    for turn in range(1, TURNS[case.phase] + 1):
                        key = f"{subject.name}, {contestant.name}, {case}, {turn}"
                        about[key] = (subject.name, degree, case)
                        actions[key] = _action(field, contestant, case, subject.vocab_size)
        readers = {degree: stack.enter_context(ReadBandwidth(degree, _cores_of(degree))) for degree in degrees}
        actions.update({reader.name: reader.bytes_per_second for reader in readers.values()})
        outcome = interleave(_shuffled(actions), rounds=rounds, watch=_teller(len(actions)))
    if outcome.failures:
        name, reason = next(iter(outcome.failures.items()))
        raise ContestantError(f"{name}: {reason}")
    for degree, reader in readers.items():
        rates = [rate for rate in outcome.results[reader.name] if not isinstance(rate, DecodeAnswer)]
        measured.read_gb_per_s[degree] = Spread.of(rates).median / 1e9
    for key, of_what in about.items():
        answers = [answer for answer in outcome.results[key] if isinstance(answer, DecodeAnswer)]
        measured.answers.setdefault(of_what, []).extend(answers)


def observations(name: str, case: Case, answers: Sequence[DecodeAnswer]) -> list[Observation]:
    """What a case tells: of decode the step, and where the prompt is long the prefill before it too."""
    config = CONFIGS[name]
    prefill = middle_mean(answer.ttft_ms for answer in answers) / 1e3
    found = []
    if case.phase == "prefill" or case.prompt_tokens > PREFILL_CHUNK:
        found.append(Observation(config, "prefill", case.batch, case.prompt_tokens, prefill))
    if case.phase == "decode":
        step = middle_mean(answer.step_ms for answer in answers) / 1e3
        found.append(Observation(config, "decode", case.batch, case.prompt_tokens + case.new_tokens // 2, step))
    return found


def _shuffled(actions: Mapping[str, Callable[[], Measured]]) -> dict[str, Callable[[], Measured]]:
    names = list(actions)
    random.Random(0).shuffle(names)
    return {name: actions[name] for name in names}


def _action(field: Field, contestant: Contestant, case: Case, vocab_size: int) -> Callable[[], Measured]:
    request = random_request(case.batch, case.prompt_tokens, case.new_tokens, vocab_size)
    waking = random_request(1, WAKING_TOKENS, 2, vocab_size)

    def answer() -> DecodeAnswer:
        field.decode(contestant.name, waking, PATIENCE_S)
        return field.decode(contestant.name, request, PATIENCE_S)

    return answer


def _contestant(model: str, dtype: str, degree: int) -> Contestant:
    return own.contestant(Task(model, dtype, most_sequences=16, most_tokens=2048), degree, _cores_of(degree))


def _cores_of(degree: int) -> int:
    """Of each rank."""
    return max(1, len(own_cores()) // degree)


def _teller_of(name: str) -> Callable[[str], None]:
    return lambda text: tell(f"{name}: {text}")


def _teller(turns: int) -> Callable[[Turn[Measured]], None]:
    """What tells of every turn, of which a round has so many."""
    numbers = itertools.cycle(range(1, turns + 1))

    def watch(turn: Turn[Measured]) -> None:
        which = "warm-up" if turn.round == WARM_UP else f"round {turn.round} of {turn.rounds}"
        tell(f"{which}, turn {next(numbers)} of {turns}: {turn.contestant}")

    return watch
