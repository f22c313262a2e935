"""A process beside the launcher that outlives it, to end what is left of a run and to remove its directory.

`python undertaker.py DIRECTORY` reads process groups from its standard input, one a line, each with the time when its
leader was started. When that is closed, which the kernel does even for a launcher that was killed, it kills them: the
ranks, and what ranks have started.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from types import TracebackType

REMOVAL_S = 10
STARTED = 19
"""Where `status_of` has the time of a process's start."""


class Undertaker:
    """Owns a temporary directory; with its end, all that the run has left ends too.

    Attributes:
        directory: for files of the run.

    Raises:
        ChildProcessError: no process can be started. OSError: there is no room for a directory.
    """

    def __init__(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="tp-decoder-")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, self.directory],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                cwd="/", start_new_session=True, text=True,
            )  # fmt: skip
        except OSError as error:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise ChildProcessError(error.errno, error.strerror) from error

    def take_over(self, process_groups: Iterable[int]) -> None:
        """Tells of ranks that have been started, each the leader of its process group."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it
            self._process.stdin.write("".join(f"{group} {_start_of(group)}\n" for group in process_groups))
            self._process.stdin.flush()

    def let_go(self) -> None:
        """What ranks that ended well have left running is theirs."""
        self._process.kill()

    def __enter__(self) -> Undertaker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=REMOVAL_S)
        shutil.rmtree(self.directory, ignore_errors=True)


def status_of(process_id: int) -> list[str]:
    """What Linux tells of a process after its name, see proc_pid_stat(5); nothing of one that has gone."""
    try:
        with open(f"/proc/{process_id}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _start_of(process_id: int) -> str:
    fields = status_of(process_id)
    return fields[STARTED] if fields else ""


def main(directory: str) -> None:
    """What the process does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher's
    for group, _, started in [line.strip().partition(" ") for line in sys.stdin]:
        if _start_of(int(group)) in ("", started):  # of a leader that has gone, the group keeps the number
            with contextlib.suppress(OSError):
                os.killpg(int(group), signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
