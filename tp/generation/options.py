"""What a request asks for: how tokens are chosen and when a sequence ends; checked where it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tp.defaults import MAX_NEW_TOKENS, PREFILL_CHUNK
from tp.errors import RequestError


@dataclass(frozen=True)
class SamplingParameters:
    """How the next token is chosen from the logits; the steps apply in the order of transformers.

    Attributes:
        temperature: 0 chooses the most likely token (greedy); otherwise logits are divided by it and a token is drawn.
        top_k: draw among the k most likely tokens, exactly k (equal logits: lowest id first); 0 = all.
        top_p: draw among the most likely tokens that together reach this probability (Holtzman et al. 2020).
        min_p: draw among tokens at least this fraction as likely as the most likely one.
        repetition_penalty: logits of tokens in the prompt or the text so far are divided by it where positive, else
            multiplied (Keskar et al. 2019); 1 = none.
        seed: of the draws. A sequence's draws depend on (seed, its index, its step), on nothing else.

    Raises:
        RequestError: a value out of range, or top_k, top_p or min_p with temperature 0, where they would do nothing.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0 <= _number(self.temperature) < math.inf, "0 (greedy) or positive")
        _check("top_k", self.top_k, _is_int(self.top_k) and self.top_k >= 0, "0 (all) or a positive integer")
        _check("top_p", self.top_p, 0 < _number(self.top_p) <= 1, "above 0 and at most 1")
        _check("min_p", self.min_p, 0 <= _number(self.min_p) <= 1, "between 0 and 1")
        penalty = self.repetition_penalty
        _check("repetition_penalty", penalty, 0 < _number(penalty) < math.inf, "a positive number")
        _check("seed", self.seed, _is_int(self.seed) and 0 <= self.seed < 2**64, "an integer in 0..2^64-1")
        if self.greedy:
            filters = {"top_k": self.top_k not in (0, 1), "top_p": self.top_p != 1, "min_p": self.min_p != 0}
            if useless := [name for name, is_set in filters.items() if is_set]:
                raise RequestError(
                    f"{' and '.join(useless)} with temperature 0 would do nothing, since greedy takes the most likely "
                    "token: set a temperature above 0"
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class GenerationOptions:
    """How long sequences become, what ends them, and how their tokens are chosen.

    Attributes:
        max_new_tokens: at most so many tokens a sequence; fewer where the context ends first.
        min_new_tokens: until so many, end-of-sequence ids are masked and stop strings are not looked for.
        ignore_eos: end-of-sequence ids end nothing (and are not masked).
        stop: strings that end a sequence; its text stops before the first of them. They need a tokenizer.
        sampling: how tokens are chosen.
        prefill_chunk: prompt tokens that one step processes, over the whole batch.

    Raises:
        RequestError: a value out of range, or min_new_tokens above max_new_tokens.
    """

    max_new_tokens: int = MAX_NEW_TOKENS
    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    prefill_chunk: int = PREFILL_CHUNK

    def __post_init__(self) -> None:
        for name, lowest in (("max_new_tokens", 1), ("min_new_tokens", 0), ("prefill_chunk", 1)):
            value = getattr(self, name)
            _check(name, value, _is_int(value) and value >= lowest, f"an integer of at least {lowest}")
        if self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_new_tokens {self.min_new_tokens} is above max_new_tokens {self.max_new_tokens}: "
                "no length fits both"
            )
        stop: object = self.stop
        if isinstance(stop, str):
            raise RequestError(f"stop is the string {self.stop!r}: give a tuple of strings, ({self.stop!r},)")
        _check("stop", stop, isinstance(stop, (tuple, list)), "a tuple of strings")
        object.__setattr__(self, "stop", tuple(self.stop))
        _check("sampling", self.sampling, isinstance(self.sampling, SamplingParameters), "SamplingParameters")
        for text in self.stop:
            _check("stop", text, isinstance(text, str) and text != "", "made of strings that are not empty")


def _check(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise RequestError(f"{name} is {value!r}: it must be {expected}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> float:
    """`value` as a float; NaN, which fails every comparison, where it is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf
