"""A process with all that it started, their own sessions and process groups included: stopped, continued, ended.

Launchers put their ranks into sessions of their own, so a process group is not enough. Linux tells parents in /proc;
elsewhere only the process group of the first process is reached.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

PROC = Path("/proc")


class ProcessTree:
    """Everything that descends from one process.

    Args:
        root: id of that process, which leads a process group.
    """

    def __init__(self, root: int) -> None:
        self.root = root
        self._members: dict[int, str] = {}  # by id, the time at which it started
        self.refresh()

    def refresh(self) -> None:
        """Notes who descends from those known. Whoever was noted once belongs to it, even when its parent has gone."""
        table = _processes()
        alive = {pid: started for pid, started in self._members.items() if table.get(pid, (0, ""))[1] == started}
        if self.root in table and not self._members:
            alive[self.root] = table[self.root][1]
        children: dict[int, list[int]] = {}
        for pid, (parent, _) in table.items():
            children.setdefault(parent, []).append(pid)
        waiting = list(alive)
        while waiting:
            for child in children.get(waiting.pop(), ()):
                if child not in alive:
                    alive[child] = table[child][1]
                    waiting.append(child)
        self._members = alive

    def members(self) -> tuple[int, ...]:
        """Ids of those alive, parents before their children where they were noted together."""
        self.refresh()
        return tuple(self._members)

    def stop(self) -> None:
        """Stops all where they are, parents first, until no member is left that could start another."""
        stopped: set[int] = set()
        while new := [pid for pid in self.members() if pid not in stopped]:
            for pid in new:
                _signal(pid, signal.SIGSTOP)
                stopped.add(pid)
        if not stopped:
            _signal_group(self.root, signal.SIGSTOP)

    def resume(self) -> None:
        """Lets all go on, children first."""
        members = self.members()
        for pid in reversed(members):
            _signal(pid, signal.SIGCONT)
        if not members:
            _signal_group(self.root, signal.SIGCONT)

    def end(self) -> None:
        """Kills all, at once: nobody gets to see that another has gone, and nobody is forgotten."""
        self.stop()
        for pid in self._members:
            _signal(pid, signal.SIGKILL)
        _signal_group(self.root, signal.SIGKILL)


def _processes() -> dict[int, tuple[int, str]]:
    """By id of each process that has not ended: its parent, and its start in clock ticks since boot."""
    found = {}
    for entry in PROC.glob("[0-9]*") if PROC.is_dir() else ():
        with contextlib.suppress(OSError, IndexError):
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] not in "ZX":
                found[int(entry.name)] = (int(fields[1]), fields[19])
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)
