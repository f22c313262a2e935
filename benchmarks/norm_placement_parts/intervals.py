"""Means, slopes and their 95 % confidence intervals over seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

STUDENT_975 = {2: 4.303, 3: 3.182, 4: 2.776, 7: 2.365, 9: 2.262, 19: 2.093, 23: 2.069}
"""Student's t by degrees of freedom: the quantile that 2.5 % lie above."""
RESAMPLES = 10_000

Floats = npt.NDArray[np.float64]


class Estimate(NamedTuple):
    """A value and the ends of its interval."""

    value: float
    low: float
    high: float

    def contains(self, number: float) -> bool:
        return self.low <= number <= self.high

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_over_seeds(values: Sequence[float] | Floats) -> Estimate:
    """The mean of one value a seed, with Student's interval."""
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean())
    half = STUDENT_975[len(array) - 1] * float(array.std(ddof=1)) / len(array) ** 0.5
    return Estimate(mean, mean - half, mean + half)


def bootstrapped(statistic: Callable[[Floats], float], values_by_seed: Floats) -> Estimate:
    """`statistic` of [seeds, …], with the percentiles of its values over seeds drawn with replacement."""
    generator = np.random.default_rng(0)
    count = len(values_by_seed)
    drawn = [statistic(values_by_seed[generator.integers(count, size=count)]) for _ in range(RESAMPLES)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Estimate(statistic(values_by_seed), float(low), float(high))


def log_log_slope(x: Sequence[float]) -> Callable[[Floats], float]:
    """Of the mean over seeds of [seeds, len(x)] against x, by least squares between logarithms."""
    centred = np.log(np.asarray(x, dtype=np.float64))
    centred -= centred.mean()

    def slope(values_by_seed: Floats) -> float:
        return float(centred @ np.log(values_by_seed.mean(0)) / (centred @ centred))

    return slope


def slope_between(pairs_by_seed: Floats) -> float:
    """Log-log slope of pairs[:, :, 1] against pairs[:, :, 0], both means over seeds of [seeds, points]."""
    x, y = np.log(pairs_by_seed.mean(0)).T
    centred = x - x.mean()
    return float(centred @ y / (centred @ centred))
