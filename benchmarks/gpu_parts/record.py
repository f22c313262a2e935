"""Results of a part, written one by one, so that a part that is ended keeps what it had."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TRACE_CHARACTERS = 2000


class OutOfBoundsError(Exception):
    """A result is further from its reference than it may be."""


class Record:
    """Appends a line of JSON to a file for each result: part, name, seconds, what was found, and a failure if any."""

    def __init__(self, path: Path, part: str) -> None:
        self.path = path
        self._part = part

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[dict[str, Any]]:
        """Gives what the body fills in. An error in the body is part of the result, and goes no further."""
        found: dict[str, Any] = {}
        failure: dict[str, str] = {}
        began = time.monotonic()
        try:
            yield found
        except Exception as error:
            failure["failure"] = f"{type(error).__name__}: {error}"
            failure["trace"] = traceback.format_exc()[-TRACE_CHARACTERS:]
        attempt = {"part": self._part, "name": name, "seconds": time.monotonic() - began}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**attempt, **found, **failure}) + "\n")


def require(holds: bool, what: str) -> None:
    """Raises:
    OutOfBoundsError: `what`, where it does not hold.
    """
    if not holds:
        raise OutOfBoundsError(what)
