"""Several measurements of one thing, as a median and how far they lie apart."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """A median with its surroundings, all in the unit of what was measured.

    Attributes:
        lower_quartile, upper_quartile: a quarter of the values lies below, or above; between two values on a line.
        count: how many values there were.
    """

    median: float
    minimum: float
    lower_quartile: float
    upper_quartile: float
    maximum: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of at least one value.

        Raises:
            ValueError: no value.
        """
        ordered = sorted(values)
        if not ordered:
            raise ValueError("there is no spread of no values")
        return cls(
            median=statistics.median(ordered),
            minimum=ordered[0],
            lower_quartile=_quantile(ordered, 0.25),
            upper_quartile=_quantile(ordered, 0.75),
            maximum=ordered[-1],
            count=len(ordered),
        )


def middle_mean(values: Iterable[float]) -> float:
    """The interquartile mean: without the lowest and the highest quarter, strays do not count, as in a median, and it
    is steadier than that where values lie in two groups.

    Raises:
        ValueError: no value.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("there is no mean of no values")
    left_out = len(ordered) // 4
    return statistics.fmean(ordered[left_out : len(ordered) - left_out])


def paired_ratio(numerators: Iterable[float], denominators: Iterable[float]) -> float:
    """The median of the ratios of values that were measured in the same round.

    Raises:
        ValueError: unequal numbers of values, or none.
    """
    ratios = [above / below for above, below in zip(numerators, denominators, strict=True)]
    if not ratios:
        raise ValueError("there is no ratio of no values")
    return statistics.median(ratios)


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
