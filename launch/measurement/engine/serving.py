"""Prefill and decode by `generate_stream`, as users run it, with the communicator's time of each."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from launch.measurement.engine.communication import Reading, of_all_ranks
from launch.measurement.requests import Communication, DecodeAnswer, DecodeRequest
from launch.measurement.serving import TokenClock

if TYPE_CHECKING:
    from tp.generation import LanguageModel
    from tp.generation.stream import TokenStream


def decode(model: LanguageModel, request: DecodeRequest, now: Callable[[], float] = time.perf_counter) -> DecodeAnswer:
    """Serves a request. Every rank calls it.

    A CUDA graph's replays are not seen by the communicator's clock: there the request is served once more without
    graphs, and its collectives are those of that second time.
    """
    answer = _serve(model, request, now)
    if model.group.device.type == "cuda" and model.group.size > 1:
        from tp.generation.decode_graphs import NAME

        with switched_off(NAME):
            again = _serve(model, request, now)
        return _with_communication(answer, again.prefill_communication, again.decode_communication)
    return answer


def begin(model: LanguageModel, request: DecodeRequest) -> TokenStream:
    """The request's stream, greedy and without ends; its steps are still to run."""
    from launch.arguments import layout_rule
    from tp.generation import GenerationOptions

    model.model.choose_layout = layout_rule(request.layout)
    options = GenerationOptions(max_new_tokens=request.new_tokens, ignore_eos=True)
    return model.generate_stream([list(ids) for ids in request.prompt_ids], options)


@contextlib.contextmanager
def switched_off(name: str) -> Iterator[None]:
    """The operation `name` in its plain form, besides those that the user has switched off."""
    from tp.choice import DISABLE_VARIABLE, disable

    users = os.environ.get(DISABLE_VARIABLE, "")
    disable(f"{users},{name}")
    try:
        yield
    finally:
        disable(users)


def _serve(model: LanguageModel, request: DecodeRequest, now: Callable[[], float]) -> DecodeAnswer:
    communicator = model.group.communicator
    at_first = Reading.of(communicator)
    readings: list[Reading] = []
    clock = TokenClock(request.batch, now)
    stream = begin(model, request)
    for event in stream:
        clock.token(event.index)
        if not readings and clock.all_have_begun:
            readings.append(Reading.of(communicator).since(at_first))
    readings.append(Reading.of(communicator).since(at_first).since(readings[0]))
    answer = clock.answer([sequence.new_ids for sequence in stream.result().sequences])
    return _with_communication(answer, *(of_all_ranks(reading, communicator) for reading in readings))


def _with_communication(
    answer: DecodeAnswer, prefill: Communication | None, decode: Communication | None
) -> DecodeAnswer:
    from dataclasses import replace

    return replace(answer, prefill_communication=prefill, decode_communication=decode)
