"""Conversations as prompts, through the template that came with the tokenizer and through nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tp.chat_template import render
from tp.checkpoint.tokenizer import as_checkpoint_error
from tp.errors import RequestError

Message = Mapping[str, str]
"""{"role": "system" | "user" | "assistant", "content": text}."""


def conversation(user: str, system: str | None = None) -> list[Message]:
    """One user turn, after a system turn if there is one. Without it a template may add its own default."""
    turns: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return [*turns, {"role": "user", "content": user}]


def encode_chat(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation, up to where the assistant's answer begins.

    The template writes the special tokens, so the text is encoded without adding any. Ids, not text, are what
    `LanguageModel.generate` should be given: text would be encoded as plain text, with special tokens in front.

    Raises:
        RequestError: the tokenizer has no chat template, or its template refuses these messages.
        CheckpointError: the tokenizer fails.
    """
    if not messages:
        raise RequestError("a conversation needs at least one message")
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError("this model's tokenizer has no chat template: give the prompt as plain text")
    text = render(tokenizer, messages, add_generation_prompt=True)
    with as_checkpoint_error("the model's tokenizer fails on this conversation"):
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
