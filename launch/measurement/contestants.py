"""Contestants that decode: all of them loaded, one of them awake."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from launch.measurement.child import Child, Command
from launch.measurement.errors import ContestantError
from launch.measurement.requests import DecodeAnswer, DecodeRequest
from launch.process_guard import ProcessGuard

A = TypeVar("A")

LOAD_TIMEOUT_S = 600.0
SETTLE_S = 0.05
"""Between waking a contestant and asking it: threads that waited find their cores again."""


@dataclass(frozen=True)
class Contestant:
    """A system in one form that can be measured.

    Attributes:
        system: its name, such as "vllm".
        processes, threads: how many processes compute, and with how many threads each.
        command: gives how it is started; raises `ContestantError` where it is not there.
    """

    system: str
    processes: int
    threads: int
    command: Callable[[], Command]

    @property
    def name(self) -> str:
        """The system with its degree of tensor parallelism."""
        return f"{self.system} tp={self.processes}"


class Field:
    """Contestants that were started; all of them are stopped but the one that is being asked.

    Enter it, and all children are ended when it is left, whichever way.

    Attributes:
        facts: of each that is ready, what it said of itself.
        failures: by name of each that is not, the reason in one line.
    """

    def __init__(self) -> None:
        self.facts: dict[str, Mapping[str, Any]] = {}
        self.failures: dict[str, str] = {}
        self._children: dict[str, Child] = {}

    def __enter__(self) -> Field:
        self._guard = ProcessGuard()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children.values():
            child.close()
        self._children.clear()
        self._guard.close()

    def load(
        self, contestants: Sequence[Contestant], watch: Callable[[str], None], timeout_s: float = LOAD_TIMEOUT_S
    ) -> None:
        """Starts them one after the other, each alone with the machine, and stops each when it is ready.

        Args:
            watch: told what goes on, in one line each time.
            timeout_s: how long one may take.
        """
        for contestant in contestants:
            watch(f"{contestant.name}: loading")
            began = time.perf_counter()
            try:
                self._start(contestant, timeout_s)
            except ContestantError as error:
                self.fail(contestant.name, str(error))
                watch(f"{contestant.name}: {error}")
                continue
            watch(f"{contestant.name}: ready after {time.perf_counter() - began:.1f} s")

    def decode(self, name: str, request: DecodeRequest, timeout_s: float) -> DecodeAnswer:
        """Has one contestant serve a request, alone with the machine.

        Raises:
            ContestantError: no answer, or one that is not what was asked for; the contestant has been ended.
        """
        return self.ask(name, request.line(), timeout_s, lambda fields: _checked(fields, request))

    def ask(self, name: str, line: str, timeout_s: float, read: Callable[[Any], A]) -> A:
        """Has one contestant answer any request that it knows, alone with the machine.

        Args:
            line: the request.
            read: makes of the answer what is given back; raises KeyError, TypeError, ValueError or ContestantError
                where it makes no sense.

        Raises:
            ContestantError: no answer, or one that makes no sense; the contestant has been ended.
        """
        if name not in self._children:
            raise ContestantError(self.failures.get(name, "it was not started"))
        child = self._children[name]
        child.resume()
        try:
            time.sleep(SETTLE_S)
            child.send(line)
            answer = _read(child.receive(timeout_s), read)
        except ContestantError as error:
            self.fail(name, str(error))
            raise
        child.stop()
        return answer

    def fail(self, name: str, reason: str) -> None:
        """Ends a contestant, if it was started, and notes why."""
        self.failures[name] = reason
        self.facts.pop(name, None)
        child = self._children.pop(name, None)
        if child is not None:
            child.close()

    def _start(self, contestant: Contestant, timeout_s: float) -> None:
        child = Child(contestant.command(), self._guard)
        self._children[contestant.name] = child
        self.facts[contestant.name] = child.wait_until_ready(timeout_s)
        child.stop()


def _read(fields: Any, read: Callable[[Any], A]) -> A:
    try:
        return read(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ContestantError(f"its answer makes no sense: {error!r}") from error


def _checked(fields: Any, request: DecodeRequest) -> DecodeAnswer:
    answer = DecodeAnswer.of_fields(fields)
    lengths = [len(ids) for ids in answer.new_ids]
    if lengths != [request.new_tokens] * request.batch:
        raise ContestantError(
            f"it made {lengths} tokens; {request.new_tokens} were asked for in each of {request.batch} sequences"
        )
    return answer
