"""Long work on every rank, agreed on at its end, that no collective's timeout can cut off."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from tp.errors import RankFailedError, TensorParallelError
from tp.parallel.group import TensorParallelGroup

T = TypeVar("T")

FIRST_WAIT_S = 0.02
LONGEST_WAIT_S = 2.0
"""How long a rank goes without telling the others that it is still at work; far below any timeout."""

_WORKING, _DONE, _BROKEN = range(3)


def work_together(group: TensorParallelGroup, action: Callable[[], T]) -> T:
    """`group.agree(action)` for work that may take minutes on some ranks: a download, a load from a slow disk.

    A second thread exchanges with the other ranks who is done, so that those who finished early do not wait in one
    collective for longer than its timeout. `action` itself must not communicate.

    Raises:
        RankFailedError: another rank met an error that is none of ours, and is ending.
    """
    if group.size == 1:
        return group.agree(action)
    exchange = _Exchange(group)
    exchange.start()
    failure: TensorParallelError | None = None
    try:
        result = action()
    except TensorParallelError as error:
        failure = error
    except BaseException:
        exchange.finish(_BROKEN)
        raise
    exchange.finish(_DONE)

    def outcome() -> T:
        if failure is not None:
            raise failure
        return result

    return group.agree(outcome)


class _Exchange(threading.Thread):
    """Tells the other ranks this one's state, again and again, until none is at work."""

    def __init__(self, group: TensorParallelGroup) -> None:
        super().__init__(daemon=True)
        self._group = group
        self._state = _WORKING
        self._finished = threading.Event()
        self._states: list[int] = []
        self._error: Exception | None = None

    def run(self) -> None:
        wait = FIRST_WAIT_S
        try:
            if self._group.device.type == "cuda":  # a thread begins with device 0
                torch.cuda.set_device(self._group.device)
            while not self._states or (_WORKING in self._states and _BROKEN not in self._states):
                self._finished.wait(wait)
                self._states = self._group.communicator.all_gather_object(self._state)
                wait = min(LONGEST_WAIT_S, wait * 1.5)
        except Exception as error:
            self._error = error

    def finish(self, state: int) -> None:
        """Ends this rank's work and waits for the others'."""
        self._state = state
        self._finished.set()
        self.join()
        if state == _BROKEN:
            return
        if self._error is not None:
            raise self._error
        if _BROKEN in self._states:
            rank = self._group.communicator.global_ranks[self._states.index(_BROKEN)]
            raise RankFailedError(f"rank {rank} failed with an error of its own")
