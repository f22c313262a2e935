"""A command of our launcher on both nodes at once, or on this machine alone, and what became of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.multi_node_parts.networks import Network, Node
from launch.process_tree import ProcessTree
from tp.errors import RankFailedError

ROOT = Path(__file__).resolve().parents[2]
RANKS_A_NODE = 2
NODES = 2
POLL_S = 0.05


@dataclass(frozen=True)
class Outcome:
    """What one launcher left.

    Attributes:
        status: its exit status.
        ended_at: on the monotonic clock.
    """

    status: int
    out: str
    err: str
    ended_at: float


class Launcher:
    """A launcher and all that it started; it reads nothing, and what it writes goes to files in `directory`."""

    def __init__(self, node: Node | None, arguments: Sequence[str], directory: Path) -> None:
        name = node.name if node else "alone"
        self._files = [directory / f"{name}.{stream}" for stream in ("out", "err")]
        prefix, environment = (node.prefix, node.environment) if node else ((), {})
        with contextlib.ExitStack() as undo:
            out, err = (undo.enter_context(path.open("w")) for path in self._files)
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "launch", *arguments],
                cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip
        self._tree = ProcessTree(self._process.pid)

    def processes(self) -> list[int]:
        """Ids of the launcher and of its ranks, in this order, but for those that have ended."""
        members = self._tree.members()
        return [pid for marker in ("launch\0", "launch.script\0") for pid in members if marker in _command_line(pid)]

    def outcome(self) -> Outcome | None:
        """None while any of its processes runs."""
        if self._process.poll() is None or self._tree.members():
            return None
        out, err = (path.read_text(errors="replace") for path in self._files)
        return Outcome(self._process.returncode, out, err, time.monotonic())

    def end(self) -> None:
        self._tree.end()
        self._process.wait()


@contextlib.contextmanager
def launched(network: Network, arguments: Sequence[str], directory: Path) -> Iterator[list[Launcher]]:
    """One launcher on each node, of ranks that meet over the link. Whoever is left at the end is killed."""
    meeting = ["--nnodes", str(NODES), "--rdzv-endpoint", f"{network.nodes[0].address}:{_free_port()}"]
    launchers: list[Launcher] = []
    command, *rest = arguments
    try:
        for node in network.nodes:
            launchers.append(Launcher(node, [command, *meeting, *node.options, *rest], directory))
        yield launchers
    finally:
        for launcher in launchers:
            launcher.end()


def wait_for(launchers: Sequence[Launcher], timeout_s: float) -> list[Outcome]:
    """What became of each, when all of its processes had ended.

    Raises:
        RankFailedError: not within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(launchers):
        for index, launcher in enumerate(launchers):
            if index not in outcomes and (outcome := launcher.outcome()):
                outcomes[index] = outcome
        if time.monotonic() > deadline:
            raise RankFailedError(f"a launcher and its ranks did not end within {timeout_s:g} s")
        time.sleep(POLL_S)
    return [outcomes[index] for index in range(len(launchers))]


def run(network: Network, arguments: Sequence[str], directory: Path, timeout_s: float = 900.0) -> list[Outcome]:
    """A command that must succeed, on both nodes.

    Raises:
        RankFailedError: it did not.
    """
    with launched(network, arguments, directory) as launchers:
        return [_checked(outcome) for outcome in wait_for(launchers, timeout_s)]


def run_alone(arguments: Sequence[str], directory: Path, timeout_s: float = 900.0) -> Outcome:
    """The same on this machine, without a network."""
    launcher = Launcher(None, arguments, directory)
    try:
        (outcome,) = wait_for([launcher], timeout_s)
    finally:
        launcher.end()
    return _checked(outcome)


def kill(process_id: int) -> None:
    """As when the kernel is out of memory: it gets no say."""
    os.kill(process_id, signal.SIGKILL)


def _free_port() -> int:
    """Of this machine; those of network namespaces are all free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _checked(outcome: Outcome) -> Outcome:
    if outcome.status:
        raise RankFailedError(f"a launcher ended with status {outcome.status}: {outcome.err.strip()[-500:]}")
    return outcome


def _command_line(process_id: int) -> str:
    """With the program's own arguments only: those of what runs on a node hold the whole command."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{process_id}/cmdline").read_text(errors="replace")
        return command if Path(command.split("\0")[0]).name.startswith("python") else ""
    return ""
