"""Stop strings in text that arrives in pieces: nothing of one is ever shown."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringFilter:
    """Passes text through until a stop string is complete, holding back what may be the beginning of one.

    Of several stop strings the one that is complete first ends the text (of those the longest), so the result
    does not depend on how the text was cut into pieces.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that may be shown now, and whether a stop string has come (then this is the last text)."""
        pending = self._held + text
        found = [(start + len(stop), start) for stop in self._stop if (start := pending.find(stop)) >= 0]
        if found:
            self._held = ""
            return pending[: min(found)[1]], True
        self._held = pending[len(pending) - self._possible_beginning(pending) :]
        return pending[: len(pending) - len(self._held)], False

    def finish(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max((len(stop) - 1 for stop in self._stop), default=0))
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
