"""Requests that contradict themselves are refused where they are made."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tp.errors import RequestError
from tp.generation import GenerationOptions, SamplingParameters


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": 1.0, "top_k": -1}, "top_k"),
        ({"temperature": 1.0, "top_k": 1.5}, "top_k"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p"),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p"),
        ({"temperature": 1.0, "min_p": -0.1}, "min_p"),
        ({"temperature": 1.0, "min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"top_p": 0.9}, "top_p with temperature 0"),
        ({"top_k": 2}, "top_k with temperature 0"),
        ({"min_p": 0.1, "top_k": 5}, "top_k and min_p with temperature 0"),
    ],
)
def test_sampling_parameters_out_of_range_or_contradictory(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        SamplingParameters(**fields)


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"min_new_tokens": 4, "max_new_tokens": 3}, "min_new_tokens 4 is above max_new_tokens 3"),
        ({"prefill_chunk": 0}, "prefill_chunk"),
        ({"stop": "end"}, "stop"),
        ({"stop": ("a", "")}, "stop"),
        ({"stop": (3,)}, "stop"),
        ({"stop": 3}, "stop is 3"),
        ({"stop": None}, "stop is None"),
        ({"sampling": None}, "sampling is None"),
    ],
)
def test_options_out_of_range_or_contradictory(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        GenerationOptions(**fields)


def test_edges_that_are_allowed() -> None:
    SamplingParameters(temperature=0, top_k=1)
    SamplingParameters(temperature=1e-30, top_p=1e-9, min_p=1, repetition_penalty=0.5, seed=2**64 - 1)
    assert GenerationOptions(max_new_tokens=3, min_new_tokens=3, stop=["a"]).stop == ("a",)  # type: ignore[arg-type]
    assert GenerationOptions().sampling.greedy
