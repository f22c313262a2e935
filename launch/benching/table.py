"""Rows as a person reads them: a table a case, on a terminal or in Markdown, of the same cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from launch.benching.rows import Collectives, Limit, Row
from launch.benching.sweep import OWN, Case
from launch.measurement.engine.requests import MEMORY
from launch.measurement.spread import Spread
from launch.report import size

if TYPE_CHECKING:
    from rich.console import Console

STEPS = {"prefill": "ms", "decode": "ms a token", "train": "ms a step"}


@dataclass(frozen=True)
class Table:
    """One case. The first column is text, the others numbers."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(rows: Sequence[Row]) -> list[Table]:
    """A table for each case, in the order of the rows."""
    return [_table(case, list(of_case)) for case, of_case in groupby(rows, key=lambda row: row.case)]


def print_tables(console: Console, rows: Sequence[Row], failures: Sequence[str]) -> None:
    """On a terminal: the tables, then who failed."""
    from rich.box import ROUNDED
    from rich.table import Table as RichTable

    for table in tables(rows):
        shown = RichTable(box=ROUNDED, title=table.title, title_justify="left", title_style="bold")
        for index, heading in enumerate(table.headings):
            shown.add_column(heading, justify="right" if index else "left")
        for cells in table.rows:
            shown.add_row(*cells)
        console.print(shown)
    for failure in failures:
        console.print(f"failed: {failure}", markup=False, soft_wrap=True)


def markdown(settings: Mapping[str, Any], rows: Sequence[Row], failures: Sequence[str]) -> str:
    """The same as a Markdown page."""
    parts = [f"{about_text(settings)}\n"]
    for table in tables(rows):
        lines = [table.headings, ("---", *("---:" for _ in table.headings[1:])), *table.rows]
        body = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
        parts.append(f"### {table.title}\n\n{body}\n")
    if failures:
        parts.append("\n".join(f"- failed: {failure}" for failure in failures) + "\n")
    return "\n".join(parts)


def about_text(settings: Mapping[str, Any]) -> str:
    """One sentence: what was measured, how often, on what."""
    machine, threads, runs = settings["machine"], settings["threads"], settings["runs"]
    weights = " with random weights" if settings["weights"] == "random" else ""
    where = ", ".join(machine["devices"]) or f"{machine['cpu']}, {machine['cores']} cores"
    return (
        f"{settings['model']}{weights}, {threads} thread{'s' if threads > 1 else ''} in all, on {where}; torch "
        f"{settings['packages']['torch']}. Medians of {runs} round{'s' if runs > 1 else ''} in turns, in brackets the "
        f"quartiles, and of times the least and the most; {settings['warm_ups']} before them did not count."
    )


def speed_up_text(speed_up: Spread, is_baseline: bool) -> str:
    """How many times as fast as t = 1, with quartiles; what is slower in three rounds of four is called so."""
    if is_baseline:
        return "1 (t = 1)"
    low, high = f"{speed_up.lower_quartile:.2f}", f"{speed_up.upper_quartile:.2f}"
    shown = f"{speed_up.median:.2f}x ({low} to {high})"
    return f"{shown}: slower than t = 1" if float(high) < 1 else shown


def summary(rows: Sequence[Row]) -> str:
    """One case in one line."""
    case = rows[0].case
    forms = []
    for row in rows:
        speed_up = "" if row.speed_up is None else f", {speed_up_text(row.speed_up, row.form.is_baseline)}"
        forms.append(f"{row.form.name} {row.milliseconds.median:,.1f} {STEPS[case.phase]}{speed_up}")
    return f"{case}: " + "; ".join(forms)


def _table(case: Case, rows: list[Row]) -> Table:
    headings = [
        "ranks x threads", STEPS[case.phase], "tokens/s", "speed-up", "efficiency", "in collectives",
        "collectives a layer", "of the limit",
    ]  # fmt: skip
    cells = [
        (
            _who(row),
            _spread_text(row.milliseconds),
            f"{row.tokens_per_s.median:,.1f}",
            "" if row.speed_up is None else speed_up_text(row.speed_up, row.form.is_baseline),
            "" if row.efficiency is None else f"{row.efficiency.median:.0%}",
            "" if row.collectives is None else _time_in(row.collectives),
            "" if row.collectives is None else _count_of(row.collectives),
            "" if row.limit is None else _share_of(row.limit),
        )
        for row in rows
    ]
    return Table(str(case), tuple(headings), tuple(cells))


def _who(row: Row) -> str:
    form = row.form
    name = f"t = {form.tp_size}" if form.system == OWN else form.contestant
    layout = "" if form.layout is None else f", {form.layout}"
    more = ""
    if (row.batch, row.tokens) != (row.case.batch, row.case.tokens):
        more = f", {row.batch} of {row.tokens} tokens"
    return f"{name}{layout} ({form.tp_size} x {form.threads}){more}"


def _spread_text(spread: Spread) -> str:
    digits = 0 if spread.median >= 10_000 else 1 if spread.median >= 10 else 3
    low, high, least, most = (
        f"{value:,.{digits}f}"
        for value in (spread.lower_quartile, spread.upper_quartile, spread.minimum, spread.maximum)
    )
    return f"{spread.median:,.{digits}f} ({low} to {high}; {least} to {most})"


def _time_in(collectives: Collectives) -> str:
    digits = 1 if collectives.milliseconds.median >= 10 else 2
    return f"{collectives.milliseconds.median:,.{digits}f} ms, {collectives.share.median:.0%}"


def _count_of(collectives: Collectives) -> str:
    return f"{collectives.calls_a_layer:.1f}, {size(round(collectives.bytes_a_layer))}"


def _share_of(limit: Limit) -> str:
    unit = "GB/s" if limit.of == MEMORY else "GFLOP/s"
    share = limit.share.median
    return f"{share:{'.1%' if share < 0.1 else '.0%'}} of {limit.rate.median / 1e9:,.1f} {unit}"
