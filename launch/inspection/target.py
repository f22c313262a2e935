"""The token whose logit is looked at, as the command line names it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from launch.inspection.token_text import TokenTexts
from tp.errors import RequestError

if TYPE_CHECKING:
    from tp.generation import LanguageModel

MOST_SHOWN = 6
"""Tokens that an error lists."""


def token_of(option: str, given: str, model: LanguageModel) -> int:
    """The id of a token given by its text or as id:N. On rank 0 only: it needs the tokenizer.

    Raises:
        RequestError: text that is not one token, or an id outside the vocabulary.
    """
    if match := re.fullmatch(r"id:(\d+)", given):
        token_id, last = int(match.group(1)), model.config.vocab_size - 1
        if token_id > last:
            raise RequestError(f"{option} {given} is outside the vocabulary: ids are 0 to {last}")
        return token_id
    tokenizer = model.require_tokenizer()
    ids: list[int] = tokenizer.encode(given, add_special_tokens=False)
    if len(ids) == 1:
        return ids[0]
    texts = TokenTexts(tokenizer)
    parts = " ".join(texts.label(token_id) for token_id in ids[:MOST_SHOWN]) + (" ..." if len(ids) > MOST_SHOWN else "")
    raise RequestError(
        f"{option} {given!r} is {len(ids)} tokens ({parts}): "
        "give the text of one, with its space in front if it begins a word, or id:N"
    )
