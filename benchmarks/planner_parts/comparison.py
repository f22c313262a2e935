"""A prediction beside what was measured, and the data files that measurements are kept in."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data"
RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass(frozen=True)
class Comparison:
    """One number, both in the same unit."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """(predicted − measured) / measured."""
        return self.predicted / self.measured - 1


def mean_error(comparisons: Iterable[Comparison]) -> float:
    """Mean of the errors' magnitudes."""
    errors = [abs(each.error) for each in comparisons]
    return sum(errors) / len(errors)


def largest_error(comparisons: Iterable[Comparison]) -> float:
    """The largest magnitude."""
    return max(abs(each.error) for each in comparisons)


def read_data(name: str) -> dict[str, Any]:
    """A file of benchmarks/data."""
    content: dict[str, Any] = json.loads((DATA / name).read_text(encoding="utf-8"))
    return content
