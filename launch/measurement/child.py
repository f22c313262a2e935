"""A contestant in processes of its own, seen from the one that measures: started, asked, stopped, continued, ended."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launch import ROOT
from launch.measurement.errors import ContestantError
from launch.measurement.serving import ANSWER, FAILED, READY
from launch.process_guard import ProcessGuard
from launch.process_tree import ProcessTree

LOOK_S = 0.5
"""How often a wait looks for processes that the child has started meanwhile."""
SAID_LENGTH = 300
"""Characters of a child's last line that a reason quotes."""


@dataclass(frozen=True)
class Command:
    """How a contestant is started.

    Attributes:
        arguments: the program and its arguments.
        environment: variables beside those that this process has; they win. None takes one away.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str | None] = field(default_factory=dict)


class Child:
    """A contestant that serves as `launch.measurement.serving` does. Starting does not wait until it is ready.

    Args:
        guard: ends it where we cannot.

    Raises:
        ContestantError: the program is not there.
    """

    def __init__(self, command: Command, guard: ProcessGuard) -> None:
        self._guard = guard
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the child
        self._unread = b""
        self.started_at = time.perf_counter()
        try:
            self._process = subprocess.Popen(
                list(command.arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                cwd=ROOT,
                env=_environment(command.environment),
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise ContestantError(f"{command.arguments[0]} cannot be started: {error.strerror}") from error
        guard.add([self._process.pid])
        self._tree = ProcessTree(self._process.pid)

    def wait_until_ready(self, timeout_s: float) -> dict[str, Any]:
        """The facts of its first line.

        Raises:
            ContestantError: it ended, failed, or said nothing for so long.
        """
        facts = self._read(READY, timeout_s)
        if not isinstance(facts, dict):
            raise ContestantError(f"it said that it is ready in words that make no sense: {facts!r}")
        return facts

    def send(self, line: str) -> None:
        """Sends a request, for whose answer `receive` waits.

        Raises:
            ContestantError: it has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
        except (BrokenPipeError, ValueError):
            raise ContestantError(self._how_it_ended()) from None

    def receive(self, timeout_s: float) -> Any:
        """What the answer to the last request holds.

        Raises:
            ContestantError: it ended, failed, or gave no answer for so long.
        """
        return self._read(ANSWER, timeout_s)

    def stop(self) -> None:
        """Stops all its processes where they are, so that none of them takes part of a core."""
        self._tree.stop()

    def resume(self) -> None:
        """Lets them go on."""
        self._tree.resume()

    def members(self) -> tuple[int, ...]:
        """Ids of its processes."""
        return self._tree.members()

    def close(self) -> None:
        """Ends it, with all that it started."""
        self._tree.end()
        self._process.wait()
        self._guard.forget([self._process.pid])
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _read(self, key: str, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            content = _object(self._next_line(deadline, timeout_s))
            if FAILED in content:
                raise ContestantError(str(content[FAILED])[:SAID_LENGTH])
            if key in content:
                return content[key]

    def _next_line(self, deadline: float, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise ContestantError(f"it gave no answer within {timeout_s:g} s{self._last_words()}")
                if not selector.select(min(left_s, LOOK_S)):
                    self._tree.refresh()
                    if self._process.poll() is not None:  # what it started may hold its output open
                        raise ContestantError(self._how_it_ended())
                    continue
                piece = os.read(self._process.stdout.fileno(), 1 << 16)
                if not piece:
                    raise ContestantError(self._how_it_ended())
                self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        status = self._process.returncode
        how = "closed its output" if status is None else f"ended with status {status}"
        return f"it {how}{self._last_words()}"

    def _last_words(self) -> str:
        """The last line on its stderr, if any: with Python, and with our commands, that is the error."""
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - 8192))
        lines = self._said.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return f": {said[-1].removeprefix('error: ')[:SAID_LENGTH]}" if said else ""


def _environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in {**os.environ, **changes}.items() if value is not None}


def _object(line: bytes) -> dict[str, Any]:
    """The object on a line; an empty one where it holds anything else, such as what a library prints."""
    try:
        content = json.loads(line)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
