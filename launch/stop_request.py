"""SIGTERM as a request: finish what is at hand, save, and end within a time of grace."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

SAME_REQUEST_S = 1.0
"""A second SIGTERM within this time is the first one again: a scheduler may signal launcher and ranks at once."""


class StopRequest:
    """Listens to SIGTERM while it is entered. Call it to know whether somebody asked.

    The first SIGTERM is noted; a later one ends the process, as SIGTERM does by default.

    Args:
        grace_s: seconds from the first SIGTERM to `give_up`.
        give_up: ends the process; called on a thread of its own.
    """

    def __init__(self, grace_s: float, give_up: Callable[[], None]) -> None:
        self._timer = threading.Timer(grace_s, give_up)
        self._timer.daemon = True
        self._asked_at: float | None = None

    def __call__(self) -> bool:
        return self._asked_at is not None

    def __enter__(self) -> StopRequest:
        self._before = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def __exit__(self, *exception: object) -> None:
        self._timer.cancel()
        signal.signal(signal.SIGTERM, self._before)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self._timer.start()
        elif time.monotonic() - self._asked_at > SAME_REQUEST_S:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
