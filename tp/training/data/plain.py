"""Text to token ids, without special tokens, so that what a model is given and what it goes on with line up."""

from __future__ import annotations

from typing import Any

from tp.checkpoint.tokenizer import as_checkpoint_error


def encode_plain(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text of any length, nothing put before or after it."""
    with as_checkpoint_error("the model's tokenizer fails on a text"):
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return ids


def continue_ids(tokenizer: Any, ids: list[int], text: str, longer: str) -> list[int]:
    """Ids of `longer`, which starts with `text`, whose `ids` are kept: a model that is given them goes on from there.

    Where the tokenizer would join the end of `text` with what follows, the two are encoded apart.
    """
    whole = encode_plain(tokenizer, longer)
    if whole[: len(ids)] == ids:
        return whole
    return ids + encode_plain(tokenizer, longer[len(text) :])
