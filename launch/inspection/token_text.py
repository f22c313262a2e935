"""Tokens as a person can read them: spaces and line ends visible, bytes that are no text as numbers."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Any

from tp.checkpoint.tokenizer import as_checkpoint_error

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
SENTENCE_PIECE_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
VISIBLE = {" ": "\N{OPEN BOX}", "\n": "↵", "\r": "␍", "\t": "⇥"}
"""How whitespace is shown."""
LONGEST_RUN = 3
"""Of one whitespace character, before a number stands for the rest."""


class TokenTexts:
    """Texts and labels of token ids.

    Args:
        tokenizer: of transformers; None for a model without one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._labels: dict[int, str] = {}

    def text(self, token_id: int) -> str | None:
        """The text of the token alone; None without a tokenizer."""
        return None if self._tokenizer is None else self._decode(token_id)

    def texts(self, token_ids: Iterable[int]) -> list[str] | None:
        """`text` of each; None without a tokenizer."""
        return None if self._tokenizer is None else [self._decode(token_id) for token_id in token_ids]

    def label(self, token_id: int) -> str:
        """The token for people, on one line, without anything that a terminal or a browser would act on.

        " Paris" is ␣Paris; the first two bytes of a character are ‹E2 80›; an id without a token is #5.
        """
        if token_id not in self._labels:
            self._labels[token_id] = self._label(token_id)
        return self._labels[token_id]

    def _decode(self, token_id: int) -> str:
        with as_checkpoint_error(f"the model's tokenizer fails on id {token_id}"):
            text: str = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return text

    def _label(self, token_id: int) -> str:
        piece = None if self._tokenizer is None else self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return f"#{token_id}"
        text = self._decode(token_id)
        if REPLACEMENT in text or not text:
            encoded = bytes_of(piece)
            return visible(piece) if encoded is None else f"‹{encoded.hex(' ').upper()}›"
        if piece.startswith(SENTENCE_PIECE_SPACE) and not text.startswith(" "):
            text = " " + text  # SentencePiece drops the space of a text's first word
        return visible(text)


def visible(text: str) -> str:
    """Text on one line: whitespace as signs, what cannot be seen as its number."""
    shown = "".join(_shown(run.group()) for run in re.finditer(r"(\s)\1*|\S", text))
    return "\N{DOTTED CIRCLE}" + shown if shown and unicodedata.combining(shown[0]) else shown


def bytes_of(piece: str) -> bytes | None:
    """The bytes that a token of a vocabulary stands for: <0xE2>, or GPT-2's alphabet; None for any other."""
    if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
        return bytes.fromhex(match.group(1))
    if piece and all(character in _BYTES for character in piece):
        return bytes(_BYTES[character] for character in piece)
    return None


def _shown(run: str) -> str:
    character = run[0]
    if character not in VISIBLE:
        return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in run)
    sign = VISIBLE[character]
    return sign * len(run) if len(run) <= LONGEST_RUN else f"{sign}×{len(run)}"


def _byte_level_alphabet() -> dict[str, int]:
    """Characters of byte-level vocabularies (GPT-2's): printable bytes are themselves, the others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_level_alphabet()
