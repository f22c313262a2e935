"""How tokens look as they come: one text live, several as labelled blocks, ids where there is no tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tp.generation import TokenEvent


class View(Protocol):
    """Turns events into what is shown of them."""

    def text_for(self, event: TokenEvent) -> str:
        """What to write after this event, possibly nothing."""


def view_of(num_prompts: int, *, has_text: bool, quiet: bool) -> View:
    """The view that fits a request."""
    if quiet:
        return Nothing()
    return Live(has_text) if num_prompts == 1 else Blocks(num_prompts, has_text)


class Nothing:
    """For --json, and for ranks that do not speak."""

    def text_for(self, event: TokenEvent) -> str:
        return ""


class Live:
    """One sequence, token by token, with a line's end after the last."""

    def __init__(self, has_text: bool) -> None:
        self._has_text = has_text

    def text_for(self, event: TokenEvent) -> str:
        piece = event.text if self._has_text else f"{event.token_id} "
        return piece if event.finish_reason is None else piece.rstrip(" " if not self._has_text else "") + "\n"


class Blocks:
    """Several sequences, each shown under a label when it and all before it have ended."""

    def __init__(self, num_prompts: int, has_text: bool) -> None:
        self._pieces = [Live(has_text) for _ in range(num_prompts)]
        self._texts = [""] * num_prompts
        self._ended = [False] * num_prompts
        self._next = 0

    def text_for(self, event: TokenEvent) -> str:
        self._texts[event.index] += self._pieces[event.index].text_for(event)
        self._ended[event.index] = event.finish_reason is not None
        shown = ""
        while self._next < len(self._ended) and self._ended[self._next]:
            shown += f"--- prompt {self._next + 1} of {len(self._ended)} ---\n{self._texts[self._next]}"
            self._next += 1
        return shown
