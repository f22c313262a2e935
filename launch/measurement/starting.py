"""From the start of a process to its first token, of contestants that are started anew each time."""

from __future__ import annotations

import time

from launch.measurement.child import Child
from launch.measurement.contestants import Contestant
from launch.measurement.requests import DecodeRequest
from launch.process_guard import ProcessGuard


def seconds_to_first_token(
    contestant: Contestant, request: DecodeRequest, guard: ProcessGuard, timeout_s: float
) -> float:
    """Starts the contestant twice in a row, asks it once and ends it; gives the seconds of the second start.

    The first brings the model and the libraries into the page cache, which may have lost them while others ran, and
    fills the caches that systems keep of what they compile.

    Args:
        request: for one new token.

    Raises:
        ContestantError: it is absent, does not start, or does not answer in time.
    """
    _start(contestant, request, guard, timeout_s)
    return _start(contestant, request, guard, timeout_s)


def _start(contestant: Contestant, request: DecodeRequest, guard: ProcessGuard, timeout_s: float) -> float:
    child = Child(contestant.command(), guard)
    try:
        child.wait_until_ready(timeout_s)
        child.send(request.line())
        child.receive(timeout_s)
        return time.perf_counter() - child.started_at
    finally:
        child.close()
