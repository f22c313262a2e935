"""Moments in the life of torch's elastic launcher, which has no way of its own to tell of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from launch import heartbeat
from launch.process_guard import ProcessGuard

GRACE_S = 3
"""Between asking ranks to end and killing them: they may sit in a collective, where they cannot hear the question."""


@contextlib.contextmanager
def when_started(action: Callable[[Any], None]) -> Iterator[None]:
    """While this is entered, `action` is called with torch's `PContext` once its ranks have been started."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    start = PContext.start

    def start_and_tell(context: Any) -> None:
        start(context)
        action(context)

    PContext.start = start_and_tell  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        PContext.start = start  # type: ignore[method-assign]


@contextlib.contextmanager
def when_closing(action: Callable[[Any], None]) -> Iterator[None]:
    """While this is entered, `action` is called before ranks are asked to end, for which they get `GRACE_S`.

    The elastic launcher has no setting for that time in every version.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext

    close = PContext.close

    def tell_and_close(context: Any, death_sig: Any = None, timeout: int = GRACE_S) -> None:
        action(context)
        close(context, death_sig, min(timeout, GRACE_S))

    PContext.close = tell_and_close  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        PContext.close = close  # type: ignore[method-assign]


class RanksHere:
    """The ranks of this machine, watched from their start to the moment when they are asked to end.

    Attributes:
        asked_to_end: global ranks whose processes still ran at that moment.
        over: set by whoever started them, once they have ended.
    """

    def __init__(self, guard: ProcessGuard) -> None:
        self.asked_to_end: set[int] = set()
        self.over = threading.Event()
        self._guard = guard
        self._closed = False

    def started(self, context: Any) -> None:
        """For `when_started`."""
        ranks = _global_ranks(context)
        process_ids = {ranks[local]: process_id for local, process_id in context.pids().items()}
        self._guard.add(process_ids.values())
        error_files = {ranks[local]: Path(path) for local, path in context.error_files.items()}
        heartbeat.watch(process_ids, error_files, self.over)

    def closing(self, context: Any) -> None:
        """For `when_closing`, which may come several times."""
        if not self._closed:
            self._closed = True
            ranks = _global_ranks(context)
            handlers = context.subprocess_handlers.items()
            self.asked_to_end = {ranks[local] for local, handler in handlers if handler.proc.poll() is None}


def _global_ranks(context: Any) -> dict[int, int]:
    return {local: int(environment["RANK"]) for local, environment in context.envs.items()}
