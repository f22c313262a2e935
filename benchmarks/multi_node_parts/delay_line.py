"""One direction of a link that delays frames and loses some: the arithmetic, without devices or clocks."""

from __future__ import annotations

import random
from collections import deque


class DelayLine:
    """Frames on their way. Those that are not lost arrive in the order in which they were sent.

    Attributes:
        delay_s: between sending and arriving, of frames sent from now on.
        loss: the share of frames that never arrive, 0 to 1.
        sent, lost: frames so far; the lost ones are among the sent.
    """

    def __init__(self, seed: int = 0) -> None:
        self.delay_s = 0.0
        self.loss = 0.0
        self.sent = self.lost = 0
        self._random = random.Random(seed)
        self._under_way: deque[tuple[float, bytes]] = deque()

    def send(self, frame: bytes, now: float) -> None:
        """A frame sets out at the time `now`."""
        self.sent += 1
        if self._random.random() < self.loss:
            self.lost += 1
            return
        earliest = self._under_way[-1][0] if self._under_way else 0.0
        self._under_way.append((max(now + self.delay_s, earliest), frame))

    def arrived(self, now: float) -> list[bytes]:
        """The frames that have arrived by `now`; each is given once."""
        frames = []
        while self._under_way and self._under_way[0][0] <= now:
            frames.append(self._under_way.popleft()[1])
        return frames

    def wait_s(self, now: float) -> float | None:
        """Until the next frame arrives; None where none is under way."""
        return max(0.0, self._under_way[0][0] - now) if self._under_way else None
