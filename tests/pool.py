"""Rank processes that are started once and serve every multi-rank test.

    def _sum_of_ranks(group, scale):                       # top level of a test module; runs on every rank
        return group.communicator.all_reduce(torch.tensor([scale * group.rank], device=group.device))

    def test_sum(ranks):
        assert ranks(3).run(_sum_of_ranks, 2.0)[0] == 6.0  # one result a rank, in rank order

The function goes to the workers by module and name, arguments and results by value through a pipe (tensors come
back detached, on the CPU). Workers are forked from one server process that has imported torch, so that a new set
costs milliseconds. Heavy imports beyond torch belong inside the functions that use them: each worker imports a test
module for itself.

Every call starts from the same state: seeds, default dtype, grad mode, environment, collective statistics.
The first rank that raises or dies ends the call for all: its error is raised in the test, the others, who may sit
in a collective, are killed, and the next call gets new workers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from pool_worker import SMALL_SET, Outcome, dumps, serve

GRACE_S = 0.5
"""How long, after one rank failed, the others may take to finish by themselves (all raised the same error)."""
_PRELOADED = ["torch", "torch.distributed", "torch.distributed.device_mesh", "pytest"]


class RankDiedError(Exception):
    """A rank process ended during a call without reporting: killed, or out of memory, or os._exit."""


class RankTimeoutError(Exception):
    """Some ranks did not finish a call in time; their stacks are on the captured stderr."""


class RemoteTraceback(Exception):
    """Cause of an error raised in a test: where the rank raised it."""


class RankPool:
    """All sets of workers of a session. Called with a degree, gives what runs functions at that degree."""

    def __init__(self) -> None:
        self._sets: dict[int, WorkerSet] = {}

    def __call__(self, tp_size: int) -> Runner:
        return Runner(self, tp_size)

    def workers(self, tp_size: int) -> WorkerSet:
        count = max(SMALL_SET, tp_size)
        if count in self._sets and not self._sets[count].alive:
            self._sets.pop(count).kill()
        if count not in self._sets:
            self._sets[count] = WorkerSet(count)
        return self._sets[count]

    def close(self) -> None:
        for workers in self._sets.values():
            workers.kill()


@dataclass(frozen=True)
class Runner:
    """Runs functions on the ranks of a group of a given size."""

    pool: RankPool
    tp_size: int

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> list[Any]:
        """`function(group, *args, **kwargs)` on every rank; the results in rank order.

        Raises:
            the error of the first rank that raised, as raised there, with `.rank` and the traceback as its cause.
            RankDiedError: a rank process died. RankTimeoutError: not all ranks finished within `timeout_s`.
        """
        return self.pool.workers(self.tp_size).run(self.tp_size, timeout_s, function, args, kwargs)


class WorkerSet:
    """Processes that together form one torch.distributed world, from which groups of any smaller size are made."""

    def __init__(self, count: int) -> None:
        self.directory = tempfile.mkdtemp(prefix="rank-pool-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, rank, count, self.directory), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)

    @property
    def alive(self) -> bool:
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []
        shutil.rmtree(self.directory, ignore_errors=True)

    def run(
        self,
        tp_size: int,
        timeout_s: float,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[Any]:
        request = dumps((tp_size, function.__module__, function.__qualname__, args, kwargs))
        try:
            for pipe in self.pipes[:tp_size]:
                with contextlib.suppress(BrokenPipeError):  # a worker that is gone is noticed, and named, below
                    pipe.send_bytes(request)
            outcomes = self._collect(tp_size, time.monotonic() + timeout_s)
        except BaseException:  # KeyboardInterrupt too: whatever is still running must not answer the next call
            self.kill()
            raise
        if all(outcome.error is None for outcome in outcomes.values()):
            return [outcomes[rank].result for rank in range(tp_size)]
        if len(outcomes) < tp_size or any(outcome.error is None for outcome in outcomes.values()):
            self.kill()
        self._raise_first(outcomes, tp_size)
        raise AssertionError("unreachable")

    def _collect(self, tp_size: int, deadline: float) -> dict[int, Outcome]:
        """Reports of the ranks until all have come, or until shortly after the first failure."""
        outcomes: dict[int, Outcome] = {}
        failed = False
        while len(outcomes) < tp_size:
            waiting = {self.pipes[rank]: rank for rank in range(tp_size) if rank not in outcomes}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready and failed:
                return outcomes
            if not ready:
                self._show_stacks(waiting.values())
                raise RankTimeoutError(f"ranks {sorted(waiting.values())} of {tp_size} did not finish in time")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                outcomes[rank] = self._receive(rank)
            if not failed and any(outcome.error is not None for outcome in outcomes.values()):
                failed = True
                deadline = min(deadline, time.monotonic() + GRACE_S)
        return outcomes

    def _receive(self, rank: int) -> Outcome:
        try:
            return pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(5)
            code = self.processes[rank].exitcode
            how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with status {code}"
            # A death comes before all that it causes on the other ranks, whichever is noticed first.
            return Outcome(when=0.0, error=RankDiedError(f"rank {rank} {how}"))

    def _show_stacks(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.2)

    @staticmethod
    def _raise_first(outcomes: dict[int, Outcome], tp_size: int) -> None:
        failures = {rank: outcome for rank, outcome in outcomes.items() if outcome.error is not None}
        rank = min(failures, key=lambda failing: (failures[failing].when, failing))
        error = failures[rank].error
        assert error is not None
        error.rank = rank  # type: ignore[attr-defined]
        raise error from RemoteTraceback(f"on rank {rank} of {tp_size}\n{failures[rank].trace}")
