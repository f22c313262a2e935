"""Memory read bandwidth of as many processes and threads as a contestant has, all reading at the same time."""

from __future__ import annotations

import sys
from types import TracebackType

from launch.measurement.child import Child, Command
from launch.measurement.errors import ContestantError
from launch.process_guard import ProcessGuard

BUFFER_BYTES = 1 << 29
"""Of each thread; far more than caches hold."""
READ_S = 0.3
START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 30.0


class ReadBandwidth:
    """Reading processes, see `launch.measurement.reader`. Enter it to start them; they rest between measurements.

    Args:
        processes, threads: how many processes read, and with how many threads each.
        buffer_bytes: of each thread's own buffer.
    """

    def __init__(self, processes: int, threads: int, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.name = f"memory read, {processes} x {threads}"
        arguments = ["--threads", str(threads), "--bytes", str(buffer_bytes)]
        self._command = Command([sys.executable, "-m", "launch.measurement.reader", *arguments])
        self._processes = processes
        self._children: list[Child] = []

    def __enter__(self) -> ReadBandwidth:
        self._guard = ProcessGuard()
        try:
            for _ in range(self._processes):
                self._children.append(Child(self._command, self._guard))
            for child in self._children:
                child.wait_until_ready(START_TIMEOUT_S)
        except ContestantError as error:
            self.__exit__(None, None, None)
            raise ContestantError(f"{self.name}: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children:
            child.close()
        self._guard.close()

    def bytes_per_second(self, seconds: float = READ_S) -> float:
        """Of all processes together, each reading for so long.

        Raises:
            ContestantError: a process ended, or gave no answer.
        """
        for child in self._children:
            child.send(str(seconds))
        return sum(float(child.receive(ANSWER_TIMEOUT_S)) for child in self._children)
