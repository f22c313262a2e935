"""The token whose logit is looked at, as the command line names it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from launch.inspection.token_text import TokenTexts
from tp.checkpoint.tokenizer import as_checkpoint_error
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
    match = re.fullmatch(r"id:(\d{1,15})", given)
    token_id = int(match.group(1)) if match else _only_token(option, given, model)
    if token_id >= model.config.vocab_size:  # some tokenizers have more tokens than the model
        which = given if match else f"{given!r}, id {token_id},"
        raise RequestError(f"{option} {which} is outside the vocabulary: ids are 0 to {model.config.vocab_size - 1}")
    return token_id


def _only_token(option: str, text: str, model: LanguageModel) -> int:
    tokenizer = model.require_tokenizer()
    with as_checkpoint_error(f"the model's tokenizer fails on {option}"):
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) == 1:
        return ids[0]
    texts = TokenTexts(tokenizer)
    parts = " ".join(texts.label(token_id) for token_id in ids[:MOST_SHOWN]) + (" ..." if len(ids) > MOST_SHOWN else "")
    raise RequestError(
        f"{option} {text!r} is {len(ids)} tokens ({parts}): "
        "give the text of one, with its space in front if it begins a word, or id:N"
    )
