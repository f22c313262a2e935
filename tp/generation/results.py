"""What generation returns: tokens as they come, and sequences with their timings at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled"]
"""stop: an end-of-sequence id or a stop string; length: max_new_tokens or the context is reached;
cancelled: rank 0 wanted no more of it."""


@dataclass(frozen=True)
class TokenEvent:
    """One new token of one sequence.

    Attributes:
        index: which prompt it continues.
        token_id: the token; an end-of-sequence id too.
        text: what this token adds to the text shown. It may be empty, while a character or a possible stop string is
            not complete; the texts of a sequence's events together are its text.
        logprob: log-probability of the token in the model's own distribution, before penalty, temperature and filters.
        finish_reason: set at the sequence's last token.
    """

    index: int
    token_id: int
    text: str
    logprob: float
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class GeneratedSequence:
    """One finished sequence.

    Attributes:
        index: which prompt it continues.
        prompt_ids: the prompt's token ids.
        new_ids: generated ids, with the end-of-sequence id where one ended it, and all the tokens that a stop string
            lies in.
        text: of the new ids, without special tokens, the end id, and anything from a stop string on. Where the
            sequence was cancelled: what had been shown until then. Empty for a model without tokenizer.
        finish_reason: what ended it.
        logprobs: of each new id, see `TokenEvent`.
    """

    index: int
    prompt_ids: tuple[int, ...]
    new_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Timings:
    """Seconds on this rank's clock.

    Attributes:
        ttft_s: from the request to the first token of any sequence (0 if there was none).
        tpot_s: (last token − first token) / (n − 1), the mean over sequences of n ≥ 2 tokens (0 if there were none).
        tokens_per_s: tokens of all sequences that came out of decode steps, by the time in those steps.
    """

    ttft_s: float
    tpot_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class GenerationResult:
    """All sequences of a request, in the order of the prompts.

    Attributes:
        sequences: one for each prompt.
        timings: of the request.
        kv_bytes: bytes of this rank's KV cache.
    """

    sequences: tuple[GeneratedSequence, ...]
    timings: Timings
    kv_bytes: int
