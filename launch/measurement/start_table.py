"""Times from process start to first token as a table, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from launch.measurement.interleaving import Rounds
from launch.measurement.peers import own
from launch.measurement.spread import Spread, paired_ratio
from launch.measurement.tables import print_failures, spread_text

if TYPE_CHECKING:
    from rich.console import Console


def print_starts(console: Console, rounds: Rounds[float]) -> None:
    """The table, then the failures."""
    from rich.box import ROUNDED
    from rich.table import Table

    ours = _ours(rounds)
    table = Table(box=ROUNDED)
    table.add_column("")
    for heading in ("s to the first token", *(f"of {name}" for name in ours)):
        table.add_column(heading, justify="right")
    for name, seconds in rounds.results.items():
        shares = [f"{paired_ratio(seconds, rounds.results[our]):.2f}x" for our in ours]
        table.add_row(name, spread_text(Spread.of(seconds), 2), *shares)
    console.print(table)
    print_failures(console, rounds.failures)


def start_fields(rounds: Rounds[float]) -> dict[str, Any]:
    """As JSON takes it: seconds, and how many times as long as this project each contestant takes."""
    return {
        "rows": [
            {
                "contestant": name,
                "seconds": asdict(Spread.of(seconds)),
                "times_own": {our: paired_ratio(seconds, rounds.results[our]) for our in _ours(rounds)},
            }
            for name, seconds in rounds.results.items()
        ],
        "failures": [{"contestant": name, "reason": reason} for name, reason in rounds.failures.items()],
    }


def _ours(rounds: Rounds[float]) -> list[str]:
    return [name for name in rounds.results if name.startswith(f"{own.NAME} ")]
