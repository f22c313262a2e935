"""A contestant's own side: it says that it is ready, then answers one line of JSON with another until its input ends.

Answers go to the stdout that the process was started with. Anything else that it or its libraries print on stdout
goes to stderr, so that no line but ours is between them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TextIO

from launch.measurement.requests import DecodeAnswer, DecodeRequest

READY = "ready"
"""Key of the first line's object, which holds what there is to know about the contestant."""
ANSWER = "answer"
"""Key of each answer's object."""
FAILED = "failed"
"""Key of an object that gives a reason, in one line, instead of the above."""


class Line:
    """The line to whoever measures. Make it first, before libraries print."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def requests(self) -> Iterator[str]:
        """Lines as they come, until there are no more."""
        for line in sys.stdin:
            yield line.strip()

    def ready(self, **facts: Any) -> None:
        """Says that requests may come."""
        self._write({READY: facts})

    def answer(self, fields: Any) -> None:
        """Answers the request at hand."""
        self._write({ANSWER: fields})

    def fail(self, error: BaseException) -> None:
        """Says why there will be no answer."""
        text = " ".join(str(error).split())
        self._write({FAILED: f"{type(error).__name__}: {text}".removesuffix(": ")})

    def _write(self, content: dict[str, Any]) -> None:
        _write_line(self._out, json.dumps(content))


def serve(line: Line, load: Callable[[], tuple[Callable[[DecodeRequest], DecodeAnswer], dict[str, Any]]]) -> None:
    """`serve_lines` of a system that knows one kind of request."""

    def load_for_lines() -> tuple[Callable[[str], Any], dict[str, Any]]:
        decode, facts = load()
        return lambda text: decode(DecodeRequest.of_line(text)).fields(), facts

    serve_lines(line, load_for_lines)


def serve_lines(line: Line, load: Callable[[], tuple[Callable[[str], Any], dict[str, Any]]]) -> None:
    """Loads, then answers until the input ends; what is raised is told, then raised.

    Args:
        load: gives what answers the text of a request, as JSON takes it, and the facts that `ready` tells.
    """
    try:
        answer, facts = load()
        line.ready(**facts)
        for text in line.requests():
            line.answer(answer(text))
    except BaseException as error:
        line.fail(error)
        raise


class TokenClock:
    """Notes when tokens come, and makes an answer of it: alike for every system.

    It starts when it is made. `now` gives seconds.
    """

    def __init__(self, batch: int, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._times: list[list[float]] = [[] for _ in range(batch)]
        self._began = now()

    def token(self, index: int) -> None:
        """Sequence `index` has a new token."""
        self._times[index].append(self._now())

    @property
    def all_have_begun(self) -> bool:
        """Whether every sequence has its first token."""
        return all(self._times)

    def tokens(self) -> None:
        """Every sequence has a new token."""
        came = self._now()
        for times in self._times:
            times.append(came)

    def answer(self, new_ids: Sequence[Sequence[int]]) -> DecodeAnswer:
        """What was noted, with the ids that the tokens were."""
        started = max(times[0] for times in self._times)
        ended = max(times[-1] for times in self._times)
        later = sum(came > started for times in self._times for came in times)
        gaps = [after - before for times in self._times for before, after in pairwise(times)]
        tokens_per_s = later / (ended - started) if later else 0.0
        return DecodeAnswer(
            ttft_ms=1e3 * (started - self._began),
            tpot_ms=1e3 * len(self._times) / tokens_per_s if later else 0.0,
            step_ms=1e3 * statistics.median(gaps) if gaps else 0.0,
            tokens_per_s=tokens_per_s,
            new_ids=tuple(tuple(ids) for ids in new_ids),
        )


def _write_line(out: TextIO, text: str) -> None:
    out.write(text + "\n")
    out.flush()
