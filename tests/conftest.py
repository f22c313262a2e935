"""The pool of ranks, the `long` marker, and the list of what was skipped at the end of a run."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pool import RankPool

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # what a shell runs in the background hears no interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)  # a second thread waits for the ranks that share the cores

_DESELECTED = pytest.StashKey[int]()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(t).run(function, *args)`: runs `function(group, *args)` on t ranks, see `pool`."""
    pool = RankPool()
    yield pool
    pool.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests marked long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    long_items = [item for item in items if item.get_closest_marker("long")]
    items[:] = [item for item in items if not item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=long_items)
    config.stash[_DESELECTED] = len(long_items)
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = len(long_items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process of pytest-xdist's has ended; each collects all tests."""
    node.config.stash[_DESELECTED] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.section("what was skipped")
    reasons = Counter(_skip_reason(report) for report in terminalreporter.stats.get("skipped", []))
    for (test, reason), count in sorted(reasons.items()):
        times = f" ({count} cases)" if count > 1 else ""
        terminalreporter.write_line(f"{test}{times}: {reason}")
    if not reasons:
        terminalreporter.write_line("nothing was skipped")
    if left_out := config.stash.get(_DESELECTED, 0):
        terminalreporter.write_line(f"{left_out} long tests were not selected: --long runs them (make test-all)")


def _skip_reason(report: pytest.TestReport) -> tuple[str, str]:
    """The test without its parameters, and the reason that it gave."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return report.nodeid.split("[")[0], reason.removeprefix("Skipped: ")
