"""What rank 0 knows of a sequence beyond its ids: the text shown so far, and whether it ends here."""

from __future__ import annotations

from collections.abc import Collection

from tp.generation.incremental_text import IncrementalText
from tp.generation.options import GenerationOptions
from tp.generation.results import FinishReason
from tp.generation.stop_strings import StopStringFilter


class SequenceText:
    """Turns one sequence's new ids into shown text and a finish reason.

    Args:
        incremental: decodes the ids; None for a model without tokenizer, whose texts are empty.
        options: lengths and stop strings.
        end_ids: ids that end the sequence, none of them shown.
        room: new tokens that the context has room for.
    """

    def __init__(
        self, incremental: IncrementalText | None, options: GenerationOptions, end_ids: Collection[int], room: int
    ) -> None:
        self._incremental = incremental
        self._stop = StopStringFilter(options.stop)
        self._end_ids = end_ids
        self._min_new_tokens = options.min_new_tokens
        self._max_new_tokens = min(options.max_new_tokens, room)
        self._count = 0

    def advance(self, token_id: int) -> tuple[str, FinishReason | None]:
        """The text that one more id adds to what is shown, and why the sequence ends, if it does."""
        self._count += 1
        if token_id in self._end_ids:
            return self._rest(), "stop"
        text, stopped = self._filtered(self._incremental.push(token_id) if self._incremental else "")
        if stopped:
            return text, "stop"
        if self._count < self._max_new_tokens:
            return text, None
        rest, stopped = self._filtered(self._incremental.finish() if self._incremental else "")
        return text + rest + self._stop.finish(), "stop" if stopped else "length"

    def _rest(self) -> str:
        rest, _ = self._filtered(self._incremental.finish() if self._incremental else "")
        return rest + self._stop.finish()

    def _filtered(self, text: str) -> tuple[str, bool]:
        return self._stop.push(text) if self._count >= self._min_new_tokens else (text, False)
