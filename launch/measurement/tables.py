"""Comparisons as a person reads them, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from launch.measurement.decoding import Comparison
from launch.measurement.rows import Row
from launch.measurement.spread import Spread

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_comparison(console: Console, comparison: Comparison) -> None:
    """A table for each case, then the failures."""
    for _, rows in groupby(comparison.rows, key=lambda row: (row.phase, row.batch, row.prompt_tokens)):
        console.print(_table(list(rows)))
    print_failures(console, comparison.failures)


def print_failures(console: Console, failures: Mapping[str, str]) -> None:
    """One line for each contestant that is missing."""
    for name, reason in failures.items():
        console.print(f"failed: {name}: {reason}", markup=False, soft_wrap=True)


def comparison_fields(comparison: Comparison) -> dict[str, Any]:
    """As JSON takes it."""
    return {
        "rows": [asdict(row) for row in comparison.rows],
        "failures": [{"contestant": name, "reason": reason} for name, reason in comparison.failures.items()],
    }


def spread_text(spread: Spread, digits: int = 1) -> str:
    """Median, then minimum and maximum."""
    return f"{spread.median:,.{digits}f} ({spread.minimum:,.{digits}f} to {spread.maximum:,.{digits}f})"


def _table(rows: list[Row]) -> Table:
    from rich.box import ROUNDED
    from rich.table import Table

    first = rows[0]
    title = f"{first.phase}, batch {first.batch}, {first.prompt_tokens} prompt tokens"
    if first.phase == "decode":
        title += f", {first.new_tokens} new tokens"
    table = Table(box=ROUNDED, title=title, title_justify="left", title_style="bold")
    ours = list(first.own_speed)
    table.add_column("processes x threads", no_wrap=True)
    for heading in ("ms a token" if first.phase == "decode" else "ms", "tokens/s", "weights GB/s", "of read bandwidth"):
        table.add_column(heading, justify="right")
    for name in ours:
        table.add_column(f"speed-up of {name}", justify="right")
    for row in rows:
        table.add_row(*_cells(row, ours))
    return table


def _cells(row: Row, ours: list[str]) -> list[str]:
    who = f"{row.contestant} ({row.processes} x {row.threads})"
    weights = f"{row.weights_gb_per_s.median:.1f}" if row.weights_gb_per_s else ""
    share = f"{row.read_share.median:.0%} of {row.read_gb_per_s.median:.1f}" if row.read_share else ""
    speeds = ["" if name == row.contestant else f"{row.own_speed[name]:.2f}x" for name in ours]
    return [who, spread_text(row.milliseconds), f"{row.tokens_per_s.median:,.1f}", weights, share, *speeds]
