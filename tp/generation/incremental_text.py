"""Text of a growing list of token ids, piece by piece, never half a character, at a bounded cost a token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from tp.checkpoint.tokenizer import as_checkpoint_error

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
WINDOW = 16
"""Ids that may wait for a character to complete before the decoder looks for a place to cut."""
LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, and so the most tokens that it can be spread over."""


class IncrementalText:
    """Decodes ids as they come; the pieces together equal `decode` of all ids at once.

    Ids are decoded together with those shown just before them (`_context`), since tokenizers treat the beginning
    of a text differently. Two kinds of tokenizers spread a character over several tokens:

    - Byte-level BPE decodes an incomplete character at the end to one replacement character: that one is held back.
      Bytes that never become a character are shown once that is certain.
    - SentencePiece byte fallback decodes a whole run of byte tokens at once (if it is not valid, all of it becomes
      replacement characters): the run is held back until another token ends it.

    Args:
        decode: ids → text.
        skipped: whether `decode` leaves an id out, such as a special token.
        byte_ids: ids of byte-fallback tokens.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        skipped: Callable[[int], bool] = lambda token_id: False,
        byte_ids: Collection[int] = (),
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        self._byte_ids = byte_ids
        self._context: list[int] = []
        self._pending: list[int] = []
        self._shown = 0  # characters of the pending ids' text that have been shown

    def push(self, token_id: int) -> str:
        """The text that this id completes, possibly none."""
        if self._skipped(token_id):
            return ""
        self._pending.append(token_id)
        if token_id in self._byte_ids:
            return ""
        text = self._pending_text()
        stable = text.removesuffix(REPLACEMENT)
        piece = stable[self._shown :]
        self._shown = max(self._shown, len(stable))
        if text and stable == text:
            self._context, self._pending, self._shown = self._pending[-WINDOW:], [], 0
        elif len(self._pending) > WINDOW:
            self._cut()
        return piece

    def finish(self) -> str:
        """The rest, once no more ids come; an incomplete character becomes a replacement character."""
        return self._pending_text()[self._shown :]

    def _pending_text(self) -> str:
        if not self._pending:
            return ""
        return self._decode(self._context + self._pending)[len(self._decode(self._context)) :]

    def _cut(self) -> None:
        """Moves pending ids into the context, up to a boundary between characters; there is one in any four ids."""
        whole = self._decode(self._pending)
        for at in range(len(self._pending) - 1, len(self._pending) - 1 - LONGEST_CHARACTER, -1):
            before, after = self._pending[:at], self._pending[at:]
            text_before, text_after = self._decode(before), self._decode(after)
            if text_after and text_before + text_after == whole:
                self._context, self._pending = before[-WINDOW:], after
                self._shown = max(0, self._shown - len(text_before))
                return


def incremental_texts(tokenizer: Any, count: int) -> list[IncrementalText | None]:
    """One `IncrementalText` a sequence for a transformers tokenizer, or nothing for each where there is none.

    Special tokens and ids without a token are skipped; spaces are left as the tokens have them.
    """
    if tokenizer is None:
        return [None] * count
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token_id for token_id, token in added.items() if token.special}

    def decode(ids: list[int]) -> str:
        with as_checkpoint_error("the model's tokenizer fails on new tokens"):
            text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def skipped(token_id: int) -> bool:
        return token_id in special or tokenizer.convert_ids_to_tokens(token_id) is None

    byte_ids = byte_fallback_ids(tokenizer)
    return [IncrementalText(decode, skipped, byte_ids) for _ in range(count)]


def byte_fallback_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens <0x00> … <0xFF>, none for a tokenizer without byte fallback."""
    ids: Sequence[int | None] = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
    unknown = tokenizer.unk_token_id
    return frozenset(token_id for token_id in ids if token_id is not None and token_id != unknown)
