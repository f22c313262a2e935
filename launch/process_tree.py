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
STARTED = 19
"""Where `status_of` has the time of a process's start, in clock ticks since boot."""


class ProcessTree:
    """Everything that descends from one process.

    Args:
        root: id of that process, which leads a process group.
    """

    def __init__(self, root: int) -> None:
        self.root = root
        self._root_started = _start_of(root)
        self._members = {root: self._root_started}  # by id, the time at which it started
        self.refresh()

    def refresh(self) -> None:
        """Notes who descends from those known. Whoever was noted once belongs to it, even when its parent has gone."""
        table = _processes()
        alive = {pid: started for pid, started in self._members.items() if table.get(pid, (0, ""))[1] == started}
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
            self._signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets all go on, children first."""
        members = self.members()
        for pid in reversed(members):
            _signal(pid, signal.SIGCONT)
        if not members:
            self._signal_group(signal.SIGCONT)

    def end(self) -> None:
        """Kills all, at once: nobody gets to see that another has gone, and nobody is forgotten."""
        self.stop()
        for pid in self._members:
            _signal(pid, signal.SIGKILL)
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        """To the group that the root leads, or led: until that is empty, no other process gets the root's number."""
        if _start_of(self.root) in ("", self._root_started):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.root, number)


def end_marked(mark: str) -> None:
    """Kills every process that was started with `mark`, "NAME=value", in its environment, and its tree: on Linux.

    Unlike parents, a mark is inherited by a daemon too, whoever has gone between it and us.
    """
    ended: set[int] = set()
    while found := [pid for pid in _marked(mark) if pid not in ended]:
        for pid in found:
            ProcessTree(pid).end()
            ended.add(pid)


def _marked(mark: str) -> list[int]:
    found = []
    for entry in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has gone, or is another user's
            if os.fsencode(mark) in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def status_of(process_id: int) -> list[str]:
    """What Linux tells of a process after its name, see proc_pid_stat(5); nothing of one that has gone."""
    try:
        return (PROC / str(process_id) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _start_of(process_id: int) -> str:
    fields = status_of(process_id)
    return fields[STARTED] if fields else ""


def _processes() -> dict[int, tuple[int, str]]:
    """By id of each process that has not ended: its parent, and the time at which it started."""
    found = {}
    for entry in PROC.glob("[0-9]*"):
        fields = status_of(int(entry.name))
        if fields and fields[0] not in "ZX":
            found[int(entry.name)] = (int(fields[1]), fields[STARTED])
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has gone, or is another user's
        os.kill(pid, number)
