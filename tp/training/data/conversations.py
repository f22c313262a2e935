"""Conversations as token ids, with the assistant's answers told from the rest, through the model's own template."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tp.chat_template import render, render_with_marks
from tp.checkpoint.tokenizer import as_checkpoint_error
from tp.errors import RequestError
from tp.training.data.documents import Conversation
from tp.training.data.plain import continue_ids

# As transformers looks for it: templates with it say themselves which tokens are the assistant's.
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode_conversation(
    tokenizer: Any, conversation: Conversation, eos_token_ids: Sequence[int]
) -> tuple[list[int], list[bool]]:
    """Ids of what the chat template makes of the messages, and which of them the assistant answers with.

    If the last turn is the assistant's and the template wrote no end-of-sequence id in or after it, the first of
    `eos_token_ids` follows, and is learned.

    Raises:
        RequestError: no chat template, or one that refuses these messages, or whose text of earlier turns depends on
            later ones, so that answers cannot be told from prompts. Names the conversation's place.
    """
    place = conversation.place
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError(f"{place}: messages need a chat template, and this tokenizer has none")
    if tokenizer.is_fast and _GENERATION_BLOCK.search(tokenizer.get_chat_template()):
        ids, learned = _marked_by_template(tokenizer, conversation)
    else:
        ids, learned = _turn_by_turn(tokenizer, conversation, eos_token_ids)
    if True not in learned:
        raise RequestError(f"{place}: the model's chat template leaves no token of an answer to learn")
    answered = conversation.messages[-1]["role"] == "assistant"
    if answered and not set(ids[_start_of_last_run(learned) :]) & set(eos_token_ids):
        return [*ids, eos_token_ids[0]], [*learned, True]
    return ids, learned


def _marked_by_template(tokenizer: Any, conversation: Conversation) -> tuple[list[int], list[bool]]:
    """What the template's own {% generation %} blocks enclose."""
    with _naming_the_place(conversation):
        text, marks = render_with_marks(tokenizer, conversation.messages)
    with as_checkpoint_error(f"{conversation.place}: the model's tokenizer fails on this conversation"):
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    marked = bytearray(len(text))
    for start, end in marks:
        marked[start:end] = b"\1" * (end - start)
    return list(encoded["input_ids"]), [1 in marked[start:end] for start, end in encoded["offset_mapping"]]


def _turn_by_turn(
    tokenizer: Any, conversation: Conversation, eos_token_ids: Sequence[int]
) -> tuple[list[int], list[bool]]:
    """An answer is what the template adds to the rendered prompt when the assistant's message joins it.

    It is learned up to the end-of-sequence id that the template writes after it: what still follows then (in many
    templates a line break) is never generated.
    """
    text, ids, learned = "", list[int](), list[bool]()
    for count, is_answer in _steps(conversation):
        asks = not is_answer and count < len(conversation.messages)
        longer = _rendered(tokenizer, conversation, count, add_generation_prompt=asks)
        if not longer.startswith(text):
            raise RequestError(
                f"{conversation.place}: the model's chat template writes what stands before message {count} otherwise "
                "once that joins: answers cannot be told from prompts; give it as prompt and completion"
            )
        ids = continue_ids(tokenizer, ids, text, longer)
        fresh = ids[len(learned) :]
        ends = [at for at, token in enumerate(fresh, start=1) if token in eos_token_ids]
        learned_of_fresh = (ends[-1] if ends else len(fresh)) if is_answer else 0
        learned += [at < learned_of_fresh for at in range(len(fresh))]
        text = longer
    return ids, learned


def _rendered(tokenizer: Any, conversation: Conversation, count: int, *, add_generation_prompt: bool = False) -> str:
    with _naming_the_place(conversation):
        return render(tokenizer, conversation.messages[:count], add_generation_prompt=add_generation_prompt)


@contextmanager
def _naming_the_place(conversation: Conversation) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{conversation.place}: {error}") from error


def _steps(conversation: Conversation) -> list[tuple[int, bool]]:
    """(how many messages to render, whether what they add to the step before is an answer)."""
    steps: list[tuple[int, bool]] = []
    for index, message in enumerate(conversation.messages):
        if message["role"] == "assistant":
            if index == 0:
                raise RequestError(f"{conversation.place}: the assistant's message comes first: it answers nothing")
            steps += [(index, False), (index + 1, True)]
    if conversation.messages[-1]["role"] != "assistant":
        steps.append((len(conversation.messages), False))
    return steps


def _start_of_last_run(learned: list[bool]) -> int:
    start = len(learned) - 1 - learned[::-1].index(True)
    while start > 0 and learned[start - 1]:
        start -= 1
    return start
