"""What the plots show, as numbers: speed-up and efficiency against t, and times made of compute and communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launch.benching.rows import Row
from launch.benching.sweep import OWN, PHASES, SCALINGS, Case, Scaling
from launch.benching.table import STEPS
from launch.measurement.spread import Spread


@dataclass(frozen=True)
class Line:
    """Medians by degree, between quartiles."""

    label: str
    degrees: tuple[int, ...]
    medians: tuple[float, ...]
    lower_quartiles: tuple[float, ...]
    upper_quartiles: tuple[float, ...]


@dataclass(frozen=True)
class LinePanel:
    """One phase.

    Attributes:
        ideal: by degree of the lines, what an engine that loses nothing would have.
    """

    title: str
    y_label: str
    lines: tuple[Line, ...]
    ideal: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Bar:
    """A median time, cut into what is spent in collectives and the rest; with its least and its most."""

    label: str
    compute: float
    communication: float
    minimum: float
    maximum: float


@dataclass(frozen=True)
class BarPanel:
    """One case."""

    title: str
    y_label: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Chart:
    """One picture: panels of one kind."""

    title: str
    panels: tuple[LinePanel, ...] | tuple[BarPanel, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def charts(rows: Sequence[Row], title: str) -> dict[str, Chart]:
    """Every picture by its name, such as "strong-speed-up"; those of rows that there are."""
    found: dict[str, Chart] = {}
    for scaling in SCALINGS:
        mine = [row for row in rows if row.case.scaling == scaling]
        if not mine:
            continue
        heading = f"{title}, {_SCALING[scaling]}"
        for name, y_label, value in (
            ("speed-up", "speed-up over t = 1", lambda row: row.speed_up),
            ("efficiency", "efficiency", lambda row: row.efficiency),
        ):
            panels = _line_panels(mine, y_label, value, name == "speed-up")
            if panels:
                found[f"{scaling}-{name}"] = Chart(heading, panels)
        found[f"{scaling}-time"] = Chart(heading, _bar_panels(mine))
    return found


_SCALING: dict[Scaling, str] = {
    "strong": "strong scaling: the same work at every t",
    "weak-batch": "weak scaling: t times as many sequences",
    "weak-tokens": "weak scaling: t times as long sequences",
}


def _line_panels(
    rows: Sequence[Row], y_label: str, value: Callable[[Row], Spread | None], is_speed_up: bool
) -> tuple[LinePanel, ...]:
    panels = []
    for phase in PHASES:
        mine = [row for row in rows if row.case.phase == phase and row.form.system == OWN and value(row) is not None]
        lines = tuple(line for case in dict.fromkeys(row.case for row in mine) for line in _lines(case, mine, value))
        if not lines:
            continue
        baseline = next(row for row in mine if row.form.is_baseline)
        units = {row.form.tp_size: row.form.units / baseline.form.units for row in mine}
        ideal = tuple((t, units[t] if is_speed_up else 1.0) for t in sorted(units))
        panels.append(LinePanel(phase, y_label, lines, ideal))
    return tuple(panels)


def _lines(case: Case, rows: Sequence[Row], value: Callable[[Row], Spread | None]) -> list[Line]:
    """A line for each layout, from t = 1 on."""
    mine = [row for row in rows if row.case == case]
    lines = []
    for layout in dict.fromkeys(row.form.layout for row in mine if row.form.layout is not None):
        points = sorted((r for r in mine if r.form.layout in (None, layout)), key=lambda row: row.form.tp_size)
        spreads = [spread for spread in map(value, points) if spread is not None]
        lines.append(
            Line(
                f"{layout}: {_short(case)}",
                tuple(row.form.tp_size for row in points),
                tuple(spread.median for spread in spreads),
                tuple(spread.lower_quartile for spread in spreads),
                tuple(spread.upper_quartile for spread in spreads),
            )
        )
    return lines


def _bar_panels(rows: Sequence[Row]) -> tuple[BarPanel, ...]:
    panels = []
    for case in dict.fromkeys(row.case for row in rows):
        bars = tuple(_bar(row) for row in rows if row.case == case)
        panels.append(BarPanel(f"{case.phase}, {_short(case)}", STEPS[case.phase], bars))
    return tuple(panels)


def _bar(row: Row) -> Bar:
    label = f"t = {row.form.tp_size}" if row.form.system == OWN else row.form.contestant
    if row.form.layout is not None:
        label += f"\n{row.form.layout}"
    total = row.milliseconds
    communication = 0.0 if row.collectives is None else row.collectives.milliseconds.median
    return Bar(label, total.median - communication, communication, total.minimum, total.maximum)


def _short(case: Case) -> str:
    return f"{case.batch} × {case.lengths}, {case.dtype}"
