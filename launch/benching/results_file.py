"""The rows of a sweep as lines of JSON: written as soon as they are measured, and gone on with after an interruption.

The first line says what they are rows of. A last line without its end is left out: something cut it off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.benching.rows import Row
from launch.benching.sweep import Case, Form
from launch.output_files import write
from tp.errors import RequestError
from tp.json_objects import parse

KIND = "kind"
SETTINGS, ROW, FAILURE = "settings", "row", "failure"
"""Values of "kind"."""
FIRST_LINE = json.dumps({KIND: SETTINGS}).removesuffix("}")
"""What a file begins with, as far as it was written."""
NOT_COMPARED = ("date",)
"""Settings that may differ between the parts of one sweep."""


class ResultsFile:
    """One file, complete after each case and each failure.

    Args:
        path: of the file.
        settings: what all its rows are measured with; the machine among them.
        resumes: rows that are there already are kept; else there must be no file.

    Raises:
        RequestError: the file is there and is not to be gone on with, or is of other settings, or cannot be written.

    Attributes:
        rows: those that are in it.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resumes: bool) -> None:
        self.path = path
        self._settings = dict(settings)
        self._failures: list[dict[str, Any]] = []
        self.rows: list[Row] = []
        if path.exists():
            if not resumes:
                raise RequestError(f"--json {path} is there already: --resume goes on with it, or name another file")
            found, self.rows = read_results(path)
            if found is not None:
                _check_same(path, found, self._settings)
        self._write()

    def put(self, rows: Sequence[Row]) -> None:
        """Writes the rows of a case, in place of those that it had: rows of a case are of the same rounds.

        Raises:
            RequestError: they cannot be written.
        """
        cases = {row.case for row in rows}
        self.rows = [*(row for row in self.rows if row.case not in cases), *rows]
        self._write()

    def add_failure(self, contestant: str, about: str, reason: str) -> None:
        """Writes down who failed.

        Raises:
            RequestError: it cannot be written.
        """
        self._failures.append({"contestant": contestant, "about": about, "reason": reason})
        self._write()

    def _write(self) -> None:
        records = [
            {KIND: SETTINGS, **self._settings},
            *({KIND: ROW, **row.to_json()} for row in self.rows),
            *({KIND: FAILURE, **failure} for failure in self._failures),
        ]
        write("--json", self.path, "".join(json.dumps(record) + "\n" for record in records).encode())


def read_results(path: Path) -> tuple[dict[str, Any] | None, list[Row]]:
    """The settings and the rows of a file; of rows that stand twice the later. No settings where it has no lines.

    Raises:
        RequestError: it cannot be read, or holds something else.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise RequestError(f"--json {path} cannot be read: {error.strerror or error}") from error
    records = [_record(path, number, line) for number, line in enumerate(lines[:-1], start=1)]  # the last is cut off
    if not records and FIRST_LINE.startswith(lines[0][: len(FIRST_LINE)]):
        return None, []
    if not records or records[0].get(KIND) != SETTINGS:
        raise RequestError(f"--json {path} is not a file of bench: its first line does not say what it is of")
    settings = {name: value for name, value in records[0].items() if name != KIND}
    try:
        rows = [Row.from_json(_without_kind(record)) for record in records if record.get(KIND) == ROW]
        return settings, list({(row.case, row.form): row for row in rows}.values())
    except ValueError as error:
        raise RequestError(f"--json {path} has a row that makes no sense: {error}") from error


def complete_cases(rows: Sequence[Row], expected: Mapping[Case, Sequence[Form]]) -> set[Case]:
    """The cases of which every form has its row."""
    there: dict[Case, set[Form]] = {}
    for row in rows:
        there.setdefault(row.case, set()).add(row.form)
    return {case for case, forms in expected.items() if there.get(case, set()).issuperset(forms)}


def _check_same(path: Path, found: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    asked = json.loads(json.dumps(asked))
    for name in [*asked, *(name for name in found if name not in asked)]:
        if name not in NOT_COMPARED and found.get(name) != asked.get(name):
            raise RequestError(
                f"--resume: {path} was measured with other settings: {name} is {_short(found.get(name))} there and "
                f"{_short(asked.get(name))} now; name another file"
            )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = parse(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise RequestError(f"--json {path}, line {number}: it is no JSON object, so this is not a file of bench")
    return record


def _without_kind(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != KIND}
