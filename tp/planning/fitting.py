"""Least squares with non-negative coefficients: what turns measured times into costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tp.planning.collectives import Line

TOLERANCE = 1e-9
"""Of gradients and pivots, beside columns of length about one."""


def fit_nonnegative(rows: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """Coefficients c ≥ 0 that minimise Σ ((row · c − time) / time)², so that short and long times count alike.

    The method of Lawson and Hanson ("Solving Least Squares Problems", 1974, chapter 23): columns enter one by one,
    the steepest first, and leave again where their coefficient would become negative.

    Args:
        rows: what each coefficient stands for, in each measurement.
        times: positive.
    """
    width = len(rows[0])
    scales = [max(abs(row[column]) / time for row, time in zip(rows, times, strict=True)) or 1.0
              for column in range(width)]  # fmt: skip
    relative = [
        [value / scale / time for value, scale in zip(row, scales, strict=True)]
        for row, time in zip(rows, times, strict=True)
    ]
    found, passive, refused = [0.0] * width, list[int](), set[int]()
    while True:
        gradient = _gradient(relative, found)
        entering = [c for c in range(width) if c not in passive and c not in refused and gradient[c] > TOLERANCE]
        if not entering:
            return [value / scale for value, scale in zip(found, scales, strict=True)]
        column = max(entering, key=lambda c: gradient[c])
        solved = _solved_with(relative, found, [*passive, column])
        if solved is None:
            refused.add(column)  # the others determine it already
            continue
        found, passive = solved
        refused.clear()
        if column not in passive:
            refused.add(column)


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> Line:
    """α + ρ·√n + n/β through times of messages of n bytes."""
    return Line(*fit_nonnegative([[1.0, math.sqrt(size), float(size)] for size in sizes], seconds))


def _gradient(rows: Sequence[Sequence[float]], coefficients: Sequence[float]) -> list[float]:
    """How much each column would take of what is left of ones."""
    left = [1.0 - sum(value * c for value, c in zip(row, coefficients, strict=True)) for row in rows]
    return [sum(row[column] * rest for row, rest in zip(rows, left, strict=True)) for column in range(len(rows[0]))]


def _solved_with(
    rows: Sequence[Sequence[float]], found: Sequence[float], columns: list[int]
) -> tuple[list[float], list[int]] | None:
    """Coefficients of the columns, those that became negative left out; None where the columns are not independent."""
    current = list(found)
    while True:
        solved = _solve(rows, columns)
        if solved is None:
            return None
        target = [0.0] * len(current)
        for column, value in zip(columns, solved, strict=True):
            target[column] = value
        negative = [column for column in columns if target[column] <= 0]
        if not negative:
            return target, columns
        step = min(current[c] / (current[c] - target[c]) if current[c] > 0 else 0.0 for c in negative)
        current = [now + step * (then - now) for now, then in zip(current, target, strict=True)]
        columns = [column for column in columns if column not in negative or current[column] > TOLERANCE]
        if not columns:
            return [0.0] * len(current), []


def _solve(rows: Sequence[Sequence[float]], columns: Sequence[int]) -> list[float] | None:
    """Least squares of Σ_c row_c x_c = 1, by its normal equations; None where the columns do not determine it."""
    augmented = [
        [sum(row[i] * row[j] for row in rows) for j in columns] + [sum(row[i] for row in rows)] for i in columns
    ]
    size = len(columns)
    for pivot in range(size):
        largest = max(range(pivot, size), key=lambda row: abs(augmented[row][pivot]))
        augmented[pivot], augmented[largest] = augmented[largest], augmented[pivot]
        if abs(augmented[pivot][pivot]) < TOLERANCE:
            return None
        for row in range(size):
            if row != pivot:
                factor = augmented[row][pivot] / augmented[pivot][pivot]
                augmented[row] = [x - factor * y for x, y in zip(augmented[row], augmented[pivot], strict=True)]
    return [augmented[i][size] / augmented[i][i] for i in range(size)]
