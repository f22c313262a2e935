"""Ranks show that they live, and the launcher ends one that does not.

A thread of each rank touches a file once a second. A rank that neither does so nor uses its processor for `SILENCE_S`
has been stopped, or hangs in a call that holds the interpreter. One that computes, or waits for a disk, is at work,
however long that takes; one that waits for others answers to the timeout of its collective.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.failures import Failure
from tp.errors import RankFailedError

BEAT_S = 1.0
SILENCE_S = 10.0
POLL_S = 0.5
NAME = "heartbeat"
"""Of the file, beside the rank's error file."""


def begin(error_file: Path) -> None:
    """On a rank: beats from now on, as long as the interpreter runs."""
    path = error_file.with_name(NAME)
    with contextlib.suppress(OSError):  # a full disk: only a stopped process is noticed then
        path.touch()
        threading.Thread(target=_beat, args=(path,), daemon=True).start()


def _beat(path: Path) -> None:
    with contextlib.suppress(OSError):  # the launcher has gone, and with it the directory
        while True:
            os.utime(path)
            time.sleep(BEAT_S)


@dataclass(frozen=True)
class Signs:
    """Of life, as the launcher sees them.

    Attributes:
        state: of the process, a letter of Linux; see proc(5).
        processor_time: ticks that it has used.
        last_beat: None before the first.
    """

    state: str
    processor_time: int
    last_beat: int | None

    @classmethod
    def of(cls, process_id: int, heartbeat: Path) -> Signs | None:
        """None for a process that has ended."""
        try:
            fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        beat = None
        with contextlib.suppress(OSError):
            beat = heartbeat.stat().st_mtime_ns
        return None if fields[0] in "ZX" else cls(fields[0], int(fields[11]) + int(fields[12]), beat)

    @property
    def is_excused(self) -> bool:
        """Waits for a disk, is held by a debugger, or has not promised to beat yet, and is not stopped."""
        return self.state in ("D", "t") or (self.last_beat is None and self.state != "T")


class RankWatch:
    """How long one rank has shown no sign of life.

    Args:
        rank: global.
        error_file: where the elastic launcher looks for its failure.
    """

    def __init__(self, rank: int, process_id: int, error_file: Path) -> None:
        self._rank = rank
        self._process_id = process_id
        self._error_file = error_file
        self._last: Signs | None = None
        self._silent_s = 0.0

    def look(self) -> None:
        """To be called every `POLL_S`. Polls are counted, not hours: what stops all processes accuses none."""
        signs = Signs.of(self._process_id, self._error_file.with_name(NAME))
        silent = signs is not None and signs == self._last and not signs.is_excused
        self._silent_s = self._silent_s + POLL_S if silent else 0.0
        self._last = signs
        if self._silent_s >= SILENCE_S:
            self._end()

    def _end(self) -> None:
        """Kills the rank, which leaves the record that it can no longer write."""
        message = f"no heartbeat for {SILENCE_S:g} s: it was stopped, or hangs"
        failure = Failure(self._rank, message, typed=True, when=time.time(), exit_code=RankFailedError.exit_code)
        with contextlib.suppress(OSError):
            failure.write(self._error_file)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process_id, signal.SIGKILL)


def watch(process_ids: Mapping[int, int], error_files: Mapping[int, Path]) -> None:
    """In the launcher: watches ranks, by their global numbers, on a thread that ends with the process. On Linux."""
    if sys.platform == "linux":
        ranks = [RankWatch(rank, process_ids[rank], error_files[rank]) for rank in process_ids]
        threading.Thread(target=_watch, args=(ranks,), daemon=True).start()


def _watch(ranks: list[RankWatch]) -> None:
    while True:
        time.sleep(POLL_S)
        for rank in ranks:
            rank.look()
