"""What ends a sequence or a request, and that one rank's decision is everyone's: no rank waits, none goes on alone."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
from generation_models import CharacterTokenizer, scripted_model, summary, tiny_model
from pool import RankPool

from tp.errors import CapacityError, RankFailedError, RequestError, TensorParallelError
from tp.generation import GenerationOptions, LanguageModel, SamplingParameters, TokenEvent
from tp.generation.cache_plan import Room
from tp.parallel import TensorParallelGroup

LIMIT_S = 20.0
"""For what must not hang: far below a collective's timeout."""
FRESH = [[5, 6, 7], [1], [30, 2]]


def works_as_new(model: LanguageModel) -> list[tuple[tuple[int, ...], str, str]]:
    """What the model generates after something happened to it; equal to `_new` if nothing of it is left."""
    return summary(model.generate(FRESH, GenerationOptions(6)))


def _new(group: TensorParallelGroup) -> list[tuple[tuple[int, ...], str, str]]:
    return works_as_new(tiny_model(group))


@pytest.fixture(scope="module")
def new(ranks: RankPool) -> list[tuple[tuple[int, ...], str, str]]:
    return ranks(1).run(_new)[0]


# --- streams ---


def _leave_stream(group: TensorParallelGroup, how: str, count: int) -> tuple[Any, ...]:
    """Rank 0 takes `count` tokens and leaves; the others follow the stream to its end."""
    model = tiny_model(group)
    stream = model.generate_stream(FRESH, GenerationOptions(60, prefill_chunk=2))
    seen: list[TokenEvent] = []
    if group.rank == 0 and how == "close":
        seen += [next(stream) for _ in range(count)]
        stream.close()
        assert next(stream, None) is None
    elif group.rank == 0 and how == "break":
        for event in stream:
            seen.append(event)
            if len(seen) == count:
                break
        del stream
    elif group.rank == 0 and how == "with":
        with stream:
            seen += [next(stream) for _ in range(count)]
    else:
        seen += list(stream)
        assert {sequence.finish_reason for sequence in stream.result().sequences} == {"cancelled"}
    return seen, works_as_new(model)


@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("how, count", [("close", 0), ("close", 4), ("break", 5), ("with", 1)])
def test_leaving_a_stream_cancels_on_all_ranks_and_leaves_the_model_usable(
    ranks: RankPool, new: Any, t: int, how: str, count: int
) -> None:
    (first, after), *others = ranks(t).run(_leave_stream, how, count, timeout_s=LIMIT_S)
    assert len(first) == count
    assert after == new
    for seen, after_there in others:
        assert seen[:count] == first  # and at most the rest of the same step
        assert len(seen) <= count + 2
        assert after_there == new


def _leave_on_another_rank(group: TensorParallelGroup) -> tuple[Any, ...]:
    model = tiny_model(group)
    with model.generate_stream(FRESH, GenerationOptions(8)) as stream:
        seen = [next(stream) for _ in range(2)] if group.rank == 1 else list(stream)
    return len(seen), summary(stream.result()), works_as_new(model)


def test_leaving_a_stream_on_another_rank_lets_rank_0_finish(ranks: RankPool, new: Any) -> None:
    first, second = ranks(2).run(_leave_on_another_rank, timeout_s=LIMIT_S)
    assert (first[0], second[0]) == (3 * 8, 2)
    assert first[1:] == second[1:]
    assert first[2] == new


def _stream_and_result(group: TensorParallelGroup) -> tuple[Any, ...]:
    model = tiny_model(group)
    options = GenerationOptions(9, sampling=SamplingParameters(temperature=1.0, top_k=20))
    stream = model.generate_stream(FRESH, options)
    events = list(stream)
    return events, summary(stream.result()), summary(model.generate(FRESH, options))


def test_a_stream_gives_every_rank_the_tokens_of_generate(ranks: RankPool) -> None:
    (events, streamed, generated), *others = ranks(3).run(_stream_and_result)
    assert streamed == generated
    for index, (new_ids, _, reason) in enumerate(streamed):
        own = [event for event in events if event.index == index]
        assert tuple(event.token_id for event in own) == new_ids
        assert [event.finish_reason for event in own] == [None] * 8 + [reason]
    assert all(other == (events, streamed, generated) for other in others)


def _two_streams_at_once(group: TensorParallelGroup) -> tuple[Any, ...]:
    model = tiny_model(group)
    streams = [model.generate_stream([prompt], GenerationOptions(6)) for prompt in FRESH]
    turns = [[next(stream).token_id for stream in streams] for _ in range(6)]
    return [tuple(ids) for ids in zip(*turns, strict=True)], [ids for ids, *_ in works_as_new(model)]


def test_streams_do_not_disturb_each_other(ranks: RankPool) -> None:
    interleaved, together = ranks(2).run(_two_streams_at_once)[1]
    assert interleaved == together


def test_after_an_error_in_the_model_a_stream_is_over() -> None:
    """The ranks are out of step then: to run the model again, to cancel, would hang."""
    model = tiny_model(TensorParallelGroup.alone())
    stream = model.generate_stream(FRESH, GenerationOptions(9))
    next(stream)
    with mock.patch.object(model, "next_token_logits", side_effect=MemoryError) as run:
        with pytest.raises(MemoryError):
            list(stream)
        assert next(stream, None) is None
        stream.close()
        del stream
    assert run.call_count == 1


# --- callbacks and errors of rank 0 ---


class ConsumerError(Exception):
    """Raised by what consumes tokens on rank 0."""


def _stop_by_the_clock(group: TensorParallelGroup) -> tuple[Any, ...]:
    """A condition that only rank 0 has, and that depends on its clock."""
    model = tiny_model(group)
    until = time.monotonic() + 0.2
    on_token = (lambda event: time.monotonic() > until) if group.rank == 0 else None
    result = model.generate(FRESH, GenerationOptions(100), on_token=on_token)
    return summary(result), works_as_new(model)


def test_a_stop_condition_on_rank_0_alone_stops_all_ranks(ranks: RankPool, new: Any) -> None:
    results = ranks(3).run(_stop_by_the_clock, timeout_s=LIMIT_S)
    sequences, after = results[0]
    assert {reason for *_, reason in sequences} <= {"cancelled", "length"}
    assert all(of_rank == (sequences, after) for of_rank in results)
    assert after == new


def _stop_one_sequence(group: TensorParallelGroup) -> Any:
    return summary(tiny_model(group).generate(FRESH, GenerationOptions(6), on_token=lambda event: event.index == 1))


def test_a_callback_ends_one_sequence(ranks: RankPool, new: Any) -> None:
    for sequences in ranks(2).run(_stop_one_sequence):
        assert sequences[1] == (new[1][0][:1], "", "cancelled")
        assert [sequences[0], sequences[2]] == [new[0], new[2]]


def _fail_on_rank_0(group: TensorParallelGroup, where: str) -> tuple[str, str, Any]:
    model = tiny_model(group)

    def fail(event: TokenEvent) -> None:
        if event.index == 2:
            raise ConsumerError("no more room for text")

    try:
        if where == "callback":
            model.generate(FRESH, GenerationOptions(50), on_token=fail)
        elif where == "with":
            with model.generate_stream(FRESH, GenerationOptions(50)) as stream:
                for event in stream:
                    if group.rank == 0:
                        fail(event)
        else:
            model.tokenizer = FailingTokenizer() if group.rank == 0 else None
            model.generate(FRESH, GenerationOptions(50))
    except BaseException as error:
        outcome = type(error).__name__, str(error)
    else:
        outcome = "nothing", ""
    model.tokenizer = None
    return *outcome, works_as_new(model)


def interrupt(event: TokenEvent) -> None:
    raise KeyboardInterrupt


class FailingTokenizer(CharacterTokenizer):
    def decode(self, ids: list[int], **options: Any) -> str:
        if ids:
            raise ConsumerError("no more room for text")
        return ""


@pytest.mark.parametrize(
    "where, kind, message",
    [
        ("callback", "ConsumerError", "no more room for text"),
        ("with", "ConsumerError", "no more room for text"),
        ("tokenizer", "CheckpointError", "the model's tokenizer fails on new tokens: no more room for text"),
    ],
)
def test_an_error_on_rank_0_is_an_error_on_every_rank(
    ranks: RankPool, new: Any, where: str, kind: str, message: str
) -> None:
    first, *others = ranks(3).run(_fail_on_rank_0, where, timeout_s=LIMIT_S)
    assert first == (kind, message, new)
    for other in others:
        assert other == ("RankFailedError", f"rank 0 raised {kind}: {message}", new)


def _error_in_a_loop(group: TensorParallelGroup) -> tuple[Any, ...]:
    model = tiny_model(group)
    count = 0
    try:
        for event in model.generate_stream(FRESH, GenerationOptions(50)):
            count += 1
            if group.rank == 0 and event.index == 1:
                raise ConsumerError
    except ConsumerError:
        pass
    return count, works_as_new(model)


def test_an_error_in_a_plain_loop_ends_the_stream_everywhere(ranks: RankPool, new: Any) -> None:
    assert ranks(2).run(_error_in_a_loop, timeout_s=LIMIT_S) == [(2, new), (3, new)]


def _interrupted(group: TensorParallelGroup) -> str:
    try:
        tiny_model(group).generate(FRESH, GenerationOptions(50), on_token=interrupt)
    except BaseException as error:
        return type(error).__name__
    return "nothing"


def test_an_interrupt_in_a_callback_reaches_all_ranks(ranks: RankPool) -> None:
    assert ranks(2).run(_interrupted, timeout_s=LIMIT_S) == ["KeyboardInterrupt", "RankFailedError"]


def _logits_that_are_not_finite(group: TensorParallelGroup) -> str:
    model = tiny_model(group)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(TensorParallelError, match="not finite") as caught:
        model.generate(FRESH, GenerationOptions(3))
    return type(caught.value).__name__


def test_logits_that_are_not_finite_are_an_error_on_every_rank(ranks: RankPool) -> None:
    outcomes = ranks(3).run(_logits_that_are_not_finite, timeout_s=LIMIT_S)
    assert outcomes == ["NumericalError"] * 3


# --- what ends a sequence ---


def _scripted(
    group: TensorParallelGroup,
    prompts: list[Any],
    options: GenerationOptions,
    script: dict[int, int],
    eos_token_ids: tuple[int, ...] = (),
    **model_options: Any,
) -> tuple[Any, ...]:
    model = scripted_model(group, script, **model_options)
    model.eos_token_ids = eos_token_ids
    if group.rank == 0:
        model.tokenizer = CharacterTokenizer()
    stream = model.generate_stream(prompts if group.rank == 0 else None, options)
    shown: dict[int, str] = {}
    for event in stream:
        shown[event.index] = shown.get(event.index, "") + event.text
        for stop in options.stop:
            assert stop not in shown[event.index]
    sequences = stream.result().sequences
    assert [shown[sequence.index] for sequence in sequences] == [sequence.text for sequence in sequences]
    return summary(stream.result())


@pytest.mark.parametrize(
    "options, eos_token_ids, script, expected",
    [
        # Rows end one by one; the end id is among the new ids and not in the text.
        ({}, (5, 3), {40: 41, 41: 3, 50: 51, 51: 52, 52: 5}, [((41, 3), "I", "stop"), ((51, 52, 5), "ST", "stop")]),
        ({}, (3,), {40: 3, 50: 51, 51: 3}, [((3,), "", "stop"), ((51, 3), "S", "stop")]),
        ({"max_new_tokens": 2}, (), {}, [((41, 42), "IJ", "length"), ((51, 52), "ST", "length")]),
        # The end id is masked until three tokens are there: the second choice comes, which is 10, then 11.
        ({"min_new_tokens": 3}, (3,), {40: 3, 3: 10, 10: 11, 11: 3, 50: 10},
         [((10, 11, 10, 11, 3), "*+*+", "stop"), ((10, 11, 10, 11, 3), "*+*+", "stop")]),
        ({"ignore_eos": True, "max_new_tokens": 3}, (3,), {40: 3, 50: 3}, [((3, 4, 5), "#$%", "length")] * 2),
        ({"stop": ("KL", "V")}, (), {}, [((41, 42, 43, 44), "IJ", "stop"), ((51, 52, 53, 54), "STU", "stop")]),
        ({"stop": ("KLX",), "max_new_tokens": 4}, (), {},
         [((41, 42, 43, 44), "IJKL", "length"), ((51, 52, 53, 54), "STUV", "length")]),
    ],
)  # fmt: skip
def test_what_ends_a_sequence(
    ranks: RankPool, options: dict[str, Any], eos_token_ids: tuple[int, ...], script: dict[int, int], expected: Any
) -> None:
    for of_rank in ranks(2).run(_scripted, ["AH", [50]], GenerationOptions(**options), script, eos_token_ids):
        assert of_rank == expected


def test_the_context_ends_a_sequence(ranks: RankPool) -> None:
    """17 tokens of prompt in a context of 20 leave room for 3; the shorter one has room for all that it may have."""
    prompts = [list(range(17)), [40]]
    for of_rank in ranks(2).run(_scripted, prompts, GenerationOptions(9), {}, max_context=20):
        assert [(len(ids), reason) for ids, _, reason in of_rank] == [(3, "length"), (9, "length")]


# --- requests that cannot be served ---


def _refused(
    group: TensorParallelGroup, prompts: Any, options: GenerationOptions | None, model_options: dict[str, Any]
) -> tuple[str, str, int]:
    """Rank 0 alone has the prompts; nobody runs the model."""
    model = tiny_model(group, **model_options)
    with pytest.raises(TensorParallelError) as caught:
        model.generate(prompts if group.rank == 0 else None, options if group.rank == 0 else None)
    return type(caught.value).__name__, str(caught.value), group.communicator.statistics.calls


@pytest.mark.parametrize(
    "prompts, options, message",
    [
        (None, None, "prompts is None"),
        ([], None, "at least one"),
        ("text", None, "give a list of texts"),
        ([[1], []], None, "prompt 1 is empty"),
        ([""], None, "prompt 0 is empty"),
        ([[1, 97]], None, "prompt 0 has token id 97: ids are 0 to 96"),
        ([[1, -1]], None, "token id -1"),
        ([[1, 2.5]], None, "prompt 0 is neither text nor a list of integer token ids"),
        ([5], None, "prompt 0 is neither text nor a list of integer token ids"),
        ([None], None, "prompt 0 is neither text nor a list of integer token ids"),
        (5, None, "prompts is 5: give a list"),
        (["\ud800"], None, "prompt 0 is not text that UTF-8 can hold"),
        ([[1] * 40], None, "prompt 0 has 40 tokens, the context 40"),
        (["Hello"], None, "text needs the model's tokenizer"),
        ([[1]], GenerationOptions(stop=("x",)), "text needs the model's tokenizer"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_on_every_rank(
    ranks: RankPool, prompts: Any, options: GenerationOptions | None, message: str
) -> None:
    first, second = ranks(2).run(_refused, prompts, options, {"max_context": 40}, timeout_s=LIMIT_S)
    assert first == second
    assert first[0] == "RequestError"
    assert message in first[1]
    assert first[2] == 0


@pytest.mark.parametrize("options", [{"max_context": 129}, {"max_context": 0}, {"max_batch_size": 0}])
def test_a_model_refuses_sizes_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        tiny_model(TensorParallelGroup.alone(), **options)


# --- memory ---


def _memory_for(model: LanguageModel, prompts: list[int], tokens: int, needed: int) -> int:
    """Bytes of a cache of so many tokens, and of steps beside it; each slot has its share of those."""
    room = Room.of(model, 0)
    return tokens * room.cached_token - room.for_cache(sum(prompts), needed, len(prompts))


def _with_free_memory(group: TensorParallelGroup, tokens: list[int], prompts: list[int]) -> tuple[Any, ...]:
    """Each rank finds memory for another number of tokens."""
    model = tiny_model(group, max_context=120)
    bytes_per_token = 2 * 2 * 8 * 4  # k and v of one KV head in two layers, float32
    free = _memory_for(model, prompts, tokens[group.rank], max(prompts) + 100)
    with mock.patch("tp.generation.request.free_memory", return_value=free):
        result = model.generate([[7] * length for length in prompts], GenerationOptions(100))
    return result.kv_bytes // bytes_per_token, [len(sequence.new_ids) for sequence in result.sequences]


def test_all_ranks_use_the_smallest_capacity(ranks: RankPool) -> None:
    assert ranks(2).run(_with_free_memory, [115, 110], [5]) == [(110, [100])] * 2


def _too_little_memory(group: TensorParallelGroup) -> str:
    with pytest.raises(CapacityError) as caught:
        _with_free_memory(group, [100, 63], [5])
    return str(caught.value)


def test_too_little_memory_is_an_error_on_every_rank(ranks: RankPool) -> None:
    first, second = ranks(2).run(_too_little_memory, timeout_s=LIMIT_S)
    assert first == second
    assert "the longest context that fits is 63 tokens" in first


def _waves_for_want_of_memory(group: TensorParallelGroup) -> tuple[Any, ...]:
    model = tiny_model(group)
    expected = works_as_new(model)
    bytes_per_token = 2 * 2 * 8 * 4
    free = _memory_for(model, [len(prompt) for prompt in FRESH], 19, 9)
    with mock.patch("tp.generation.request.free_memory", return_value=free):
        result = model.generate(FRESH, GenerationOptions(6))
    return result.kv_bytes // bytes_per_token, summary(result) == expected


def test_prompts_take_turns_where_memory_is_short(ranks: RankPool) -> None:
    assert ranks(2).run(_waves_for_want_of_memory) == [(2 * 9, True)] * 2  # two slots of 3 + 6 tokens, not three


def _raise_a_bug(group: TensorParallelGroup) -> str:
    model = tiny_model(group)
    model.set_tokenizer_loader(lambda: {}["absent"])
    try:
        model.generate([[1]])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_any_error_while_a_request_is_taken_reaches_every_rank(ranks: RankPool) -> None:
    first, second = ranks(2).run(_raise_a_bug, timeout_s=LIMIT_S)
    assert first == "KeyError: 'absent'"
    assert second == "RankFailedError: rank 0 could not take the request: KeyError: 'absent'"
    assert issubclass(RankFailedError, TensorParallelError)
