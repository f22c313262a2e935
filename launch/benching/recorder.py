"""What has been measured and who has failed, kept, written and told as it happens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from launch.benching.measure import Result
from launch.benching.progress import SweepDisplay
from launch.benching.results_file import ResultsFile
from launch.benching.rows import Row
from launch.benching.sweep import Case
from launch.benching.table import summary
from launch.measurement.interleaving import Turn


class Recorder:
    """The `Watcher` of `launch.benching.measure`.

    Args:
        file: where rows and failures go, and earlier rows come from; None: nowhere.
        display: shows what goes on.
    """

    def __init__(self, file: ResultsFile | None, display: SweepDisplay) -> None:
        self._file = file
        self._display = display
        self._rows: list[Row] = [] if file is None else list(file.rows)
        self._failed: dict[tuple[str, str], str] = {}

    def say(self, text: str) -> None:
        self._display.say(text)

    def turn(self, case: Case, turn: Turn[Result]) -> None:
        self._display.turn(case, turn)

    def rows(self, rows: Sequence[Row]) -> None:
        if not rows:
            return  # what the file has of the case is still the last that is known
        self._rows = [*(row for row in self._rows if row.case != rows[0].case), *rows]
        if self._file is not None:
            self._file.put(rows)
        self._display.say(summary(rows))

    def failures(self, about: str, reasons: Mapping[str, str]) -> None:
        for name, reason in reasons.items():
            if (about, name) not in self._failed:
                self._failed[about, name] = reason
                if self._file is not None:
                    self._file.add_failure(name, about, reason)

    def all_rows(self, cases: Iterable[Case]) -> list[Row]:
        """Rows of these cases in their order, then those of others that the file had."""
        order = {case: place for place, case in enumerate(cases)}
        return sorted(self._rows, key=lambda row: order.get(row.case, len(order)))

    def failure_lines(self) -> list[str]:
        """One for each."""
        return [f"{name} ({about}): {reason}" for (about, name), reason in self._failed.items()]
