"""Tokens as they come, from a request that ends early where nobody wants the rest."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Iterator
from types import TracebackType

from tp.generation.engine import GenerationSession
from tp.generation.results import GenerationResult, TokenEvent


class TokenStream(Iterator[TokenEvent]):
    """Iterates over the new tokens of all sequences; every rank gets the same ones and must follow to the end.

    Closing it (`close`, the end of a `with` block, or leaving the loop that held it) on rank 0 cancels the request on
    every rank, with the next step; the model can be used again at once. On another rank closing it serves the request
    on, unseen, until it ends or rank 0 closes too.

    An exception that leaves a `with` block on rank 0 is raised on the other ranks as `RankFailedError`; a loop without
    `with` cannot tell it from a break, and cancels.
    """

    def __init__(self, session: GenerationSession, rank: int) -> None:
        self._session = session
        self._rank = rank
        self._events: deque[TokenEvent] = deque()

    def __next__(self) -> TokenEvent:
        while not self._events:
            if self._session.finished:
                raise StopIteration
            self._events.extend(self._session.step())
        return self._events.popleft()

    def result(self) -> GenerationResult:
        """The sequences and timings; complete once the stream has ended, until then what there is."""
        return self._session.result()

    def close(self) -> None:
        """Ends the request; nothing happens where it has ended already."""
        self._events.clear()
        while not self._session.finished:
            self._session.step(cancel=self._rank == 0)

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._rank != 0 or self._session.finished:
            self.close()
            return
        with contextlib.suppress(type(error)):  # it is on its way already
            self._session.step(failure=error)

    def __del__(self) -> None:
        if sys.is_finalizing():  # the group is gone
            return
        with contextlib.suppress(Exception):
            self.close()
