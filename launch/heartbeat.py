"""Ranks show that they live, and the launcher ends one that does not.

A thread of each rank touches a file once a second. A rank that neither does so nor uses its processor for `SILENCE_S`
has been stopped, or hangs in a call that holds the interpreter. One that computes, waits for a core or for a disk, or
is traced, is at work, however long that takes; one that waits for others answers to the timeout of its collective.
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
from launch.process_tree import STARTED, status_of
from tp.errors import RankFailedError

BEAT_S = 1.0
SILENCE_S = 10.0
POLL_S = 0.5
REMEDY = "py-spy dump within that time shows where, --debug what its libraries say"
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
        started: when it was, in ticks since the machine was. With its number, no other process's.
        last_beat: None before the first.
    """

    state: str
    processor_time: int
    started: str
    last_beat: int | None

    @classmethod
    def of(cls, process_id: int, heartbeat: Path) -> Signs | None:
        """None for a process that has ended."""
        fields = status_of(process_id)
        if not fields or fields[0] in "ZX":
            return None
        beat = None
        with contextlib.suppress(OSError):
            beat = heartbeat.stat().st_mtime_ns
        return cls(fields[0], int(fields[11]) + int(fields[12]), fields[STARTED], beat)

    @property
    def is_excused(self) -> bool:
        """Waits for a disk or for a core, is traced, or has not promised to beat yet, and is not stopped."""
        return self.state in ("D", "R", "t") or (self.last_beat is None and self.state != "T")


class RankWatch:
    """How long one rank has shown no sign of life. It holds on to the process, whose number may become another's.

    Args:
        rank: global.
        process_id: of a child that nobody has waited for yet.
        error_file: where the elastic launcher looks for its failure.

    Raises:
        OSError: the process cannot be held on to.
    """

    def __init__(self, rank: int, process_id: int, error_file: Path) -> None:
        self._rank = rank
        self._process_id = process_id
        self._process = os.pidfd_open(process_id)
        self._error_file = error_file
        first = self._signs()
        self._started = first.started if first else ""
        self._last: Signs | None = None
        self._silent_s = 0.0

    def look(self) -> bool:
        """To be called every `POLL_S`. Polls are counted, not hours: what stops all processes accuses none.

        Returns:
            Whether to look again; else the process has gone, or has been ended, and this is closed.
        """
        signs = self._signs()
        if signs is None or signs.started != self._started:
            self.close()
            return False
        silent = signs == self._last and not signs.is_excused
        self._silent_s = self._silent_s + POLL_S if silent else 0.0
        self._last = signs
        if self._silent_s < SILENCE_S:
            return True
        self._end()
        self.close()
        return False

    def close(self) -> None:
        """Lets go of the process."""
        os.close(self._process)

    def _signs(self) -> Signs | None:
        return Signs.of(self._process_id, self._error_file.with_name(NAME))

    def _end(self) -> None:
        """Kills the rank, which leaves the record that it can no longer write."""
        message = f"no heartbeat for {SILENCE_S:g} s: it was stopped, or hangs; {REMEDY}"
        failure = Failure(self._rank, message, typed=True, when=time.time(), exit_code=RankFailedError.exit_code)
        with contextlib.suppress(OSError):
            failure.write(self._error_file)
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)


def watch(process_ids: Mapping[int, int], error_files: Mapping[int, Path], over: threading.Event) -> None:
    """In the launcher: watches ranks, by their global numbers, on a thread that ends when it is `over`. On Linux."""
    if sys.platform != "linux":
        return
    ranks: list[RankWatch] = []
    for rank, process_id in process_ids.items():
        with contextlib.suppress(OSError):  # an old kernel, or no more descriptors: its peers' timeout must do
            ranks.append(RankWatch(rank, process_id, error_files[rank]))
    threading.Thread(target=_watch, args=(ranks, over), daemon=True).start()


def _watch(ranks: list[RankWatch], over: threading.Event) -> None:
    while ranks and not over.wait(POLL_S):
        ranks = [rank for rank in ranks if rank.look()]
    for rank in ranks:
        rank.close()
