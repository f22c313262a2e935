"""From the start of a process to its first token, of contestants that are started anew each time."""

from __future__ import annotations

import time
from pathlib import Path

from launch.measurement.child import Child
from launch.measurement.contestants import Contestant
from launch.measurement.requests import DecodeRequest
from launch.process_guard import ProcessGuard

READ_BYTES = 1 << 24


def seconds_to_first_token(
    contestant: Contestant, request: DecodeRequest, guard: ProcessGuard, timeout_s: float
) -> float:
    """Starts the contestant, asks it once, ends it; gives the seconds until it had answered.

    Args:
        request: for one new token.

    Raises:
        ContestantError: it is absent, does not start, or does not answer in time.
    """
    child = Child(contestant.command(), guard)
    try:
        child.wait_until_ready(timeout_s)
        child.send(request.line())
        child.receive(timeout_s)
        return time.perf_counter() - child.started_at
    finally:
        child.close()


def read_into_page_cache(model: str) -> int:
    """Reads all files of a checkpoint, so that starting waits for no disk; gives how many bytes they have."""
    path = Path(model)
    nbytes = 0
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as opened:
                while piece := opened.read(READ_BYTES):
                    nbytes += len(piece)
    return nbytes
