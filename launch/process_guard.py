"""A process beside ours that outlives it, to end what ours has started and to remove its directory.

It reads a line for each change: `+ID` to guard the tree of a process, `-ID` to forget it. When its input is closed,
which the kernel does even for a process that was killed, it kills the trees that are still guarded, and what carries
the directory's name in its environment.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from launch import ROOT
from launch.process_tree import ProcessTree, end_marked

MARK = "TP_DECODER_RUN"
"""Environment variable: the directory of the run that a process belongs to, wherever it has gone."""
END_S = 10
"""How long the guard may take to end everything."""


class ProcessGuard:
    """The guard, seen from the process that it watches. Enter it, and what is guarded ends when it is left.

    Args:
        directory: removed at the end too. What was started with it as `MARK` in its environment ends as well, but not
            what it has been started from: the guard must be made before the mark is set.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from launch.process_guard import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code, *([str(directory)] if directory else [])],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            cwd="/", start_new_session=True, text=True,
        )  # fmt: skip

    def add(self, process_ids: Iterable[int]) -> None:
        """From now on these end with us, each the leader of its process group, and all that they have started."""
        self._tell("+", process_ids)

    def forget(self, process_ids: Iterable[int]) -> None:
        """These have ended."""
        self._tell("-", process_ids)

    def release(self) -> None:
        """What is still guarded may go on."""
        self._process.kill()

    def close(self) -> None:
        """Ends what is still guarded, and the guard."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=END_S)
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)  # a guard that was killed has not

    def __enter__(self) -> ProcessGuard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _tell(self, change: str, process_ids: Iterable[int]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it
            self._process.stdin.write("".join(f"{change}{process_id}\n" for process_id in process_ids))
            self._process.stdin.flush()


def main() -> None:
    """What the guard does, whatever signals a terminal sends to all of its programs."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    trees: dict[int, ProcessTree] = {}
    for line in sys.stdin:
        process_id = int(line[1:])
        if line.startswith("+"):
            trees[process_id] = ProcessTree(process_id)
        else:
            trees.pop(process_id, None)
    for tree in trees.values():
        tree.end()
    for directory in sys.argv[1:]:
        end_marked(f"{MARK}={directory}")
        shutil.rmtree(directory, ignore_errors=True)
