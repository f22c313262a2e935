"""`python -m launch.measurement.warden`: ends process trees when whoever started it is gone, however it went.

Its input is a line for each change: `+ID` to guard the tree of a process, `-ID` to forget it. When the input ends, by
the end of the process that held the other side even if it was killed, all trees that are still guarded are ended.
"""

from __future__ import annotations

import atexit
import signal
import subprocess
import sys
from collections.abc import Iterable

from launch.measurement.process_tree import ProcessTree
from launch.ranks import ROOT


class Warden:
    """The guarding process, seen from the one that it watches."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "launch.measurement.warden"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd=ROOT,
            start_new_session=True,
            text=True,
        )
        atexit.register(self.close)

    def guard(self, pid: int) -> None:
        """From now on the tree of this process ends with us."""
        self._tell(f"+{pid}")

    def forget(self, pid: int) -> None:
        """The tree of this process has ended."""
        self._tell(f"-{pid}")

    def close(self) -> None:
        """Ends what is still guarded, and the warden."""
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()


def watch(lines: Iterable[str]) -> None:
    """Follows the lines to their end, then ends the trees that are left."""
    trees: dict[int, ProcessTree] = {}
    for line in lines:
        pid = int(line[1:])
        if line.startswith("+"):
            trees[pid] = ProcessTree(pid)
        else:
            trees.pop(pid, None)
    for tree in trees.values():
        tree.end()


def main() -> None:
    """Watches, whatever signals a terminal sends to all of its programs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watch(sys.stdin)


if __name__ == "__main__":
    main()
