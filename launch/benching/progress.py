"""How a sweep is shown while it runs: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from launch.benching.measure import Result
from launch.benching.rows import Sample
from launch.benching.sweep import Case
from launch.benching.table import STEPS
from launch.measurement.interleaving import WARM_UP, Turn
from launch.terminal import Terminal

LINE_EVERY_S = 10.0


class SweepDisplay:
    """Shows measurements on stderr. Entered around the sweep.

    Args:
        total: measurements that are to be made.
    """

    def __init__(self, terminal: Terminal, total: int) -> None:
        self._console = terminal.console
        self._is_live = terminal.err.isatty()
        self._total = total
        self._done = 0
        self._bar: Any = None
        self._last_line = -LINE_EVERY_S

    def __enter__(self) -> SweepDisplay:
        if self._is_live:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns: list[Any] = [MofNCompleteColumn(), BarColumn(20), TextColumn("{task.description}", markup=False)]
            self._bar = Progress(*columns, TextColumn("ETA"), TimeRemainingColumn(), console=self._console)
            self._task = self._bar.add_task("", total=self._total)
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def turn(self, case: Case, turn: Turn[Result]) -> None:
        """After each measurement."""
        self._done += 1
        text = turn_text(case, turn)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=text)
        elif time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            self.say(f"{self._done}/{self._total} {text}")

    def say(self, text: str) -> None:
        """A line that stays, above the bar."""
        self._console.print(text, soft_wrap=True, markup=False)


def turn_text(case: Case, turn: Turn[Result]) -> str:
    """One measurement in one line."""
    when = "warm-up" if turn.round == WARM_UP else f"round {turn.round} of {turn.rounds}"
    if not isinstance(turn.result, Sample):
        return f"{case}: {when}: {turn.contestant}: {turn.result / 1e9:,.1f} G/s"
    inside = ""
    if turn.result.communication is not None:
        inside = f", {turn.result.communication_ms[0]:,.2f} ms in collectives"
    return f"{case}: {when}: {turn.contestant}: {turn.result.milliseconds:,.1f} {STEPS[case.phase]}{inside}"
