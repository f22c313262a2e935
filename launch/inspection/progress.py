"""A bar over the positions whose lens is read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from launch.terminal import Terminal


@contextlib.contextmanager
def lens_progress(terminal: Terminal) -> Iterator[Callable[[int, int], None]]:
    """A bar for work that reports (positions done, positions of all); shown only where somebody sees it."""
    if not terminal.speaks or not terminal.err.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=terminal.console, transient=True) as bar:
        task = bar.add_task("reading the lens", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
