"""How a run over two nodes ends when a part of it does: how soon every process is gone, and what the user is told."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.multi_node_parts.launching import NODES, RANKS_A_NODE, Launcher, kill, launched, wait_for
from benchmarks.multi_node_parts.networks import Network
from tp.errors import RankFailedError

ENDLESS = "benchmarks.multi_node_parts.endless"
START_S = 600.0
END_S = 180.0


@dataclass(frozen=True)
class End:
    """How a run ended.

    Attributes:
        what: happened.
        seconds: from then until the last process of both nodes was gone.
        statuses: of the launchers.
        last_lines: the last line of each on stderr.
    """

    what: str
    seconds: float
    statuses: list[int]
    last_lines: list[str]


def ends(network: Network, *, with_cut: bool) -> list[End]:
    """Kills launchers and ranks in turn, and at last cuts the link."""
    events: dict[str, Callable[[Sequence[Launcher]], None]] = {
        "the second node's launcher is killed": lambda launchers: kill(launchers[1].processes()[0]),
        "the first node's launcher is killed": lambda launchers: kill(launchers[0].processes()[0]),
        "a rank of the second node is killed": lambda launchers: kill(launchers[1].processes()[1]),
    }
    if with_cut:
        events["the link is cut"] = lambda launchers: network.set(0.0, 1.0)
    found = []
    for what, event in events.items():
        with tempfile.TemporaryDirectory(prefix="tp-multi-node-") as directory:
            found.append(_end(network, what, event, Path(directory)))
        network.set(0.0, 0.0)
    return found


def _end(network: Network, what: str, event: Callable[[Sequence[Launcher]], None], directory: Path) -> End:
    ranks = ["--nproc", str(RANKS_A_NODE), "-m", ENDLESS, str(directory)]
    with launched(network, ["run", *ranks], directory) as launchers:
        _wait_until_busy(launchers, directory)
        began = time.monotonic()
        event(launchers)
        outcomes = wait_for(launchers, END_S)
    seconds = max(outcome.ended_at for outcome in outcomes) - began
    last_lines = [(outcome.err.strip().splitlines() or [""])[-1] for outcome in outcomes]
    return End(what, seconds, [outcome.status for outcome in outcomes], last_lines)


def _wait_until_busy(launchers: Sequence[Launcher], directory: Path) -> None:
    """All ranks have finished a collective, and are in others."""
    deadline = time.monotonic() + START_S
    while len(list(directory.glob("rank-*"))) < NODES * RANKS_A_NODE:
        if time.monotonic() > deadline or any(launcher.outcome() for launcher in launchers):
            raise RankFailedError("the ranks did not start")
        time.sleep(0.1)
    time.sleep(0.5)
