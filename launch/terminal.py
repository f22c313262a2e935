"""Where a process of a run may write: rank 0 to the user, the others nowhere, libraries to a log."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tp.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console


@dataclass
class Terminal:
    """The user's stdout and stderr, or nothing on ranks that must not speak.

    Attributes:
        out: results.
        err: everything else.
        speaks: whether anything written here reaches the user.
    """

    out: TextIO
    err: TextIO
    speaks: bool = True

    @classmethod
    def of_process(cls) -> Terminal:
        """Of a process that is alone: what Python gives it. A character that its encoding lacks becomes a "?"."""
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        return cls(sys.stdout, sys.stderr)

    @classmethod
    def apart_from_libraries(cls, log: Path | None = None) -> Terminal:
        """Own copies of stdout and stderr; what libraries print goes to the log, or to stderr without one."""
        sys.stdout.flush()
        terminal = cls(_copy(1), _copy(2))
        if log is not None:
            redirect(log, 2)
        os.dup2(2, 1)
        return terminal

    @classmethod
    @contextlib.contextmanager
    def of_command(cls, *, json: bool) -> Iterator[Terminal]:
        """Of a process that is alone, for a command; with `json`, libraries print nothing to stdout meanwhile."""
        if not json:
            yield cls.of_process()
            return
        terminal = cls.apart_from_libraries()
        try:
            yield terminal
        finally:
            terminal._take_back()

    def _take_back(self) -> None:
        """Ends `apart_from_libraries`: stdout and stderr are what they were."""
        sys.stdout.flush()
        for stream, descriptor in ((self.out, 1), (self.err, 2)):
            os.dup2(stream.fileno(), descriptor)
            with contextlib.suppress(OSError):  # `show` has told of it
                stream.close()

    @classmethod
    def silent(cls) -> Terminal:
        """Of ranks that must not speak."""
        return cls(io.StringIO(), io.StringIO(), speaks=False)

    @property
    def console(self) -> Console:
        """A rich console on stderr."""
        from rich.console import Console

        return Console(file=self.err, quiet=not self.speaks, highlight=False)

    def show(self, text: str) -> None:
        """Writes a piece of the result, at once.

        Raises:
            BrokenPipeError: nobody reads it any more.
            RequestError: it cannot be written, to a full disk for example.
        """
        if not self.speaks:
            return
        try:
            self.out.write(text)
            self.out.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            self.abandon()
            raise RequestError(f"standard output cannot be written: {error.strerror}") from error

    def abandon(self) -> None:
        """After an error in writing: what is still buffered must not raise at exit."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.out.fileno())

    @contextlib.contextmanager
    def progress(self, description: str) -> Iterator[Callable[[int, int], None] | None]:
        """A bar for work that reports (bytes done, bytes of all); None where nobody would see it."""
        if not self.speaks or not self.err.isatty():
            yield None
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}")
        with Progress(*columns, TimeElapsedColumn(), console=self.console, transient=True) as bar:
            task = bar.add_task(description, total=None, amount="")

            def report(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total, amount=f"{done / 1e6:,.1f}/{total / 1e6:,.1f} MB")

            yield report


def open_closed_streams() -> None:
    """Gives a process that was started with stdin, stdout or stderr closed the null device in its place.

    Else Python has None there, and the next file that is opened gets the descriptor and whatever is printed.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, descriptor)
            if opened == descriptor:
                os.set_inheritable(descriptor, True)
            else:
                os.close(opened)
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", encoding="utf-8", closefd=False))


def redirect(target: Path | str, descriptor: int) -> None:
    """Makes a descriptor of this process write to a file."""
    opened = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(opened, descriptor)
    os.close(opened)


def _copy(descriptor: int) -> TextIO:
    return os.fdopen(os.dup(descriptor), "w", encoding="utf-8", errors="replace")
