"""SIGTERM to the launcher, passed on to ranks that know what to do with it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

from launch.elastic import when_started

REPORT_S = 5.0
"""What ranks get beyond their grace: they keep to it themselves, and say so, unless they hang."""


class ForwardedSigterm:
    """The first SIGTERM goes to the ranks; the second, or the end of the grace, is the elastic launcher's.

    Attributes:
        sent: whether there was one.
    """

    def __init__(self, grace_s: float) -> None:
        self.sent = False
        self._limit_s = grace_s + REPORT_S
        self._context: Any = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While this is entered, ranks that are started get what the launcher gets."""
        try:
            with when_started(self._listen):
                yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _listen(self, context: Any) -> None:
        self._context = context
        self._elastic: Any = signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGALRM, self._on_alarm)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self.sent:
            self._elastic(signal.SIGTERM, frame)  # raises
        self.sent = True
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)
        for process_id in self._context.pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGTERM)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        self._elastic(signal.SIGTERM, frame)
