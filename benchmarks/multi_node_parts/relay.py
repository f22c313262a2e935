"""Two network devices joined by this process, which delays and loses frames as a long wire would."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import threading
import time
from collections.abc import Mapping

from benchmarks.multi_node_parts.delay_line import DelayLine

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_LONGEST_FRAME = 1 << 16
_NICENESS = -10
"""Of the relaying thread: ranks wait for it, and it does little."""
_IDLE_S = 0.2


class Tap:
    """An Ethernet device whose frames this process reads and writes; it lives as long as its file is open.

    Raises:
        OSError: there is no /dev/net/tun, or no permission for it.
    """

    def __init__(self, name: str) -> None:
        self.file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        try:
            fcntl.ioctl(self.file, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
        except OSError:
            os.close(self.file)
            raise

    def close(self) -> None:
        os.close(self.file)


class Relay:
    """Moves frames between two devices until it is closed, on a thread of its own."""

    def __init__(self, one: Tap, other: Tap) -> None:
        self._devices = (one, other)
        self._lines: Mapping[int, DelayLine] = {one.file: DelayLine(seed=1), other.file: DelayLine(seed=2)}
        self._target = {one.file: other.file, other.file: one.file}
        self._ends = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def set(self, delay_s: float, loss: float) -> None:
        """What happens to frames in both directions from now on."""
        for line in self._lines.values():
            line.delay_s, line.loss = delay_s, loss

    def frames(self) -> tuple[int, int]:
        """Sent and lost so far, both directions together."""
        return sum(line.sent for line in self._lines.values()), sum(line.lost for line in self._lines.values())

    def close(self) -> None:
        self._ends = True
        self._thread.join()
        for device in self._devices:
            device.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # without the right to it, times are less exact
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while not self._ends:
            now = time.monotonic()
            waits = [wait for line in self._lines.values() if (wait := line.wait_s(now)) is not None]
            ready, _, _ = select.select(list(self._lines), [], [], min([*waits, _IDLE_S]))
            for source in ready:
                self._take_in(source)
            self._deliver()

    def _take_in(self, source: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._lines[source].send(os.read(source, _LONGEST_FRAME), time.monotonic())

    def _deliver(self) -> None:
        for source, line in self._lines.items():
            for frame in line.arrived(time.monotonic()):
                with contextlib.suppress(OSError):  # a device that is down, or full, loses it
                    os.write(self._target[source], frame)
