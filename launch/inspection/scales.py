"""Axes: from values to places, and where the ticks stand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
MOST_DECADES = 6
"""Powers of ten that a logarithmic axis marks."""


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` on places from `start` to `end`, linear or logarithmic.

    Attributes:
        ticks: values to be marked.
    """

    low: float
    high: float
    start: float
    end: float
    is_logarithmic: bool
    ticks: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float], start: float, end: float, *, is_logarithmic: bool) -> Scale:
        """One that holds all values; a linear one holds 0 too. A logarithmic one leaves out what is not positive."""
        if is_logarithmic:
            positive = [value for value in values if value > 0] or [1.0]
            low, high = min(positive) / 1.15, max(positive) * 1.15
            return cls(low, high, start, end, True, logarithmic_ticks(low, high))
        low, high = min(0.0, *values), max(0.0, *values)
        margin = 0.06 * (high - low) or 1.0
        low, high = low - margin * (low < 0), high + margin * (high > 0 or low == 0)
        return cls(low, high, start, end, False, linear_ticks(low, high))

    def __call__(self, value: float) -> float:
        """The place of a value; the start for what a logarithmic scale cannot show."""
        if not self.is_logarithmic:
            return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)
        if value <= self.low:
            return self.start
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


def linear_ticks(low: float, high: float, most: int = 6) -> tuple[float, ...]:
    """Multiples of 1, 2 or 5 times a power of ten within the bounds, at most `most` of them."""
    power = 10.0 ** (math.floor(math.log10((high - low) / most)))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.ceil(low / step), math.floor(high / step)
        if last - first < most:
            return tuple(index * step for index in range(first, last + 1))
    raise AssertionError("the last step is twice what is needed")


def logarithmic_ticks(low: float, high: float) -> tuple[float, ...]:
    """Powers of ten within the bounds, not too many; where they are few, their multiples by 2 and 5 too."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = math.ceil((last - first + 1) / MOST_DECADES)
    decades = [10.0**power for power in range(first, last + 1) if power % every == 0]
    factors = (1, 2, 5) if math.log10(high / low) < 3 else (1,)
    return tuple(factor * decade for decade in decades for factor in factors if low <= factor * decade <= high)


def tick_text(value: float) -> str:
    """A tick's label: 0.5, 20, 10k, 10⁻⁸."""
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k".replace("-", "−")
    if 0 < abs(value) < 0.001:
        mantissa, exponent = f"{value:.0e}".split("e")
        return f"{mantissa}·10".removeprefix("1·") + str(int(exponent)).translate(SUPERSCRIPTS)
    return f"{value:.4g}".replace("-", "−")
