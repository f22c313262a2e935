"""Rounds in which every contestant has its turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from launch.measurement.errors import ContestantError

T = TypeVar("T")

WARM_UP = 0
"""Number of the first round when `Turn` speaks of a warm-up; measured rounds count from 1."""


@dataclass(frozen=True)
class Turn(Generic[T]):
    """One contestant's measurement in one round, as it is told to whoever watches.

    Attributes:
        round: from 1; `WARM_UP` where the result does not count.
        rounds: how many count.
    """

    contestant: str
    round: int
    rounds: int
    result: T


@dataclass
class Rounds(Generic[T]):
    """What came out of the rounds.

    Attributes:
        results: by contestant, one a round, so that results of equal index belong together. Only of contestants that
            lasted to the end.
        failures: by contestant that did not, the reason in one line.
    """

    results: dict[str, list[T]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def interleave(
    contestants: Mapping[str, Callable[[], T]],
    *,
    rounds: int,
    warm_ups: int = 1,
    watch: Callable[[Turn[T]], None] = lambda turn: None,
) -> Rounds[T]:
    """Measures every contestant once a round.

    Each round begins with another contestant, so that none profits from always following the same one.

    Args:
        contestants: by name, what measures once. One that raises `ContestantError` is out, with all of its results.
        rounds: rounds that count.
        warm_ups: rounds before those, whose results are dropped.
        watch: called after each turn.
    """
    outcome: Rounds[T] = Rounds({name: [] for name in contestants})
    for number in range(1 - warm_ups, rounds + 1):
        for name in _rotated(list(outcome.results), number):
            try:
                result = contestants[name]()
            except ContestantError as error:
                del outcome.results[name]
                outcome.failures[name] = str(error)
                continue
            watch(Turn(name, max(number, WARM_UP), rounds, result))
            if number >= 1:
                outcome.results[name].append(result)
    return outcome


def _rotated(names: list[str], by: int) -> Iterator[str]:
    start = by % len(names) if names else 0
    yield from names[start:] + names[:start]
