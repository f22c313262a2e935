"""A request as rank 0 understands it, checked, and made known to every rank before the model runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

from tp.checkpoint.free_memory import free_memory
from tp.checkpoint.memory import check_fits
from tp.checkpoint.tokenizer import as_checkpoint_error
from tp.errors import RankFailedError, RequestError, TensorParallelError
from tp.generation.cache_plan import Room, plan_cache
from tp.generation.options import GenerationOptions
from tp.generation.text_model import TextModel
from tp.models.description import statement_of_model
from tp.parallel.agreement import Statement, compare, in_short

SHOWN_OF_A_PROMPT = 24
"""Characters of a prompt in a message about ranks whose prompts differ."""

Prompt = str | Sequence[int]
"""Text, encoded as the model's tokenizer encodes plain text, or token ids."""


@dataclass(frozen=True)
class Request:
    """What is to be generated, and in what cache.

    Attributes:
        prompts: token ids.
        options: of rank 0.
        context: most tokens that a sequence may have, prompt and new ones together.
        needed: tokens that the longest sequence may come to.
        num_slots, capacity: of the KV cache.
    """

    prompts: tuple[tuple[int, ...], ...]
    options: GenerationOptions
    context: int
    needed: int
    num_slots: int
    capacity: int


def share_request(model: TextModel, make: Callable[[], Request], asked: Statement) -> Request:
    """Rank 0's request on every rank, with a cache that fits on every rank.

    Args:
        make: called on rank 0 alone; what it raises is raised everywhere.
        asked: what this rank was called with, to be compared with what the others were, as is the model.

    Raises:
        CommunicationError: on every rank, where their models or what they were called with differ.
        RequestError, CapacityError: on every rank, before any collective of the model.
        RankFailedError: on the other ranks, where rank 0 met an error of another type.
    """
    own: Request | Exception | None = None
    if model.group.rank == 0:
        try:
            own = make()
        except Exception as error:  # whatever it is, the other ranks wait below for what became of the request
            own = error
    room = Room.of(model, free_memory(model.group))
    statement = {**statement_of_model(model), **asked}
    shared = model.group.communicator.all_gather_object((statement, _sendable(own), room))
    compare(model.group.communicator.global_ranks, [of_rank for of_rank, _, _ in shared])
    request: Request | Exception = own or shared[0][1]
    if isinstance(request, Exception):
        raise request
    step_tokens = min(request.options.prefill_chunk, sum(map(len, request.prompts)))
    rooms = [of_rank for _, _, of_rank in shared]
    num_slots, capacity = plan_cache(rooms, request.num_slots, request.capacity, request.needed, step_tokens)
    if not num_slots:
        check_fits(
            model.config,
            model.group,
            weight_bytes=0,
            num_slots=1,
            capacity=request.needed,
            dtype=model.dtype,
            free_bytes=max(0, room.for_cache(step_tokens, request.needed, 1)),
        )
    return replace(request, num_slots=num_slots, capacity=capacity)


def encode_prompts(model: TextModel, prompts: Sequence[Prompt] | None) -> tuple[tuple[int, ...], ...]:
    """Token ids of each prompt, checked against the vocabulary. On rank 0 only: it needs the tokenizer.

    Raises:
        RequestError: no prompts, an empty one, text without a tokenizer, or ids outside the vocabulary.
        CheckpointError: the tokenizer fails.
    """
    if prompts is None or isinstance(prompts, str) or not isinstance(prompts, Sized) or len(prompts) == 0:
        raise RequestError(f"prompts is {prompts!r}: give a list of texts or of lists of token ids, at least one")
    return tuple(_encode(model, index, prompt) for index, prompt in enumerate(prompts))


def _encode(model: TextModel, index: int, prompt: Prompt) -> tuple[int, ...]:
    given: Sequence[Any] = _encode_text(model, index, prompt) if isinstance(prompt, str) and prompt else prompt
    try:
        ids = tuple(operator.index(token_id) for token_id in given)
    except TypeError as error:
        raise RequestError(f"prompt {index} is neither text nor a list of integer token ids: {error}") from error
    if not ids:
        which = f"{prompt!r}, which has no tokens" if isinstance(prompt, str) and prompt else "empty"
        raise RequestError(f"prompt {index} is {which}: it must have at least one token")
    if outside := [token_id for token_id in ids if not 0 <= token_id < model.config.vocab_size]:
        raise RequestError(f"prompt {index} has token id {outside[0]}: ids are 0 to {model.config.vocab_size - 1}")
    return ids


def _encode_text(model: TextModel, index: int, text: str) -> Sequence[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # a lone surrogate, which tokenizers take for a value of another type
        raise RequestError(f"prompt {index} is not text that UTF-8 can hold: {error}") from error
    tokenizer = model.require_tokenizer()
    with as_checkpoint_error(f"the model's tokenizer fails on prompt {index}"):
        ids: Sequence[int] = tokenizer.encode(text)
    return ids


def statement_of_prompts(prompts: Sequence[Prompt] | None) -> dict[str, str]:
    """What a rank was given, for `share_request`; nothing where rank 0 alone counts, or where it makes no sense."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, str):
        return {}
    statement = {"the number of prompts": str(len(prompts))}
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            statement[f"prompt {index}"] = in_short(repr(prompt), SHOWN_OF_A_PROMPT)
        elif isinstance(prompt, Sequence):
            statement[f"prompt {index}"] = in_short(str(list(prompt)), SHOWN_OF_A_PROMPT)
    return statement


def generation_request(model: TextModel, prompts: Sequence[Prompt] | None, options: GenerationOptions) -> Request:
    """What `LanguageModel.generate` was asked for, checked. On rank 0 only.

    Raises:
        RequestError: see `encode_prompts`; a prompt that fills the context; stop strings without a tokenizer.
    """
    context = model.context
    encoded = encode_prompts(model, prompts)
    for index, prompt in enumerate(encoded):
        if len(prompt) >= context:
            raise RequestError(
                f"prompt {index} has {len(prompt)} tokens, the context {context}: "
                "shorten the prompt, or raise max_context, to leave room for a new token"
            )
    if options.stop:
        model.require_tokenizer()
    _ = model.tokenizer  # loaded here, where an error reaches every rank
    needed = min(max(map(len, encoded)) + options.max_new_tokens, context)
    capacity = context if model.max_context else needed
    return Request(encoded, options, context, needed, model.max_batch_size or len(encoded), capacity)


def _sendable(own: Request | Exception | None) -> Request | Exception | None:
    if isinstance(own, Exception) and not isinstance(own, TensorParallelError):
        return RankFailedError(f"rank 0 could not take the request: {type(own).__name__}: {own}")
    return own
