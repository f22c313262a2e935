"""Decode from captured steps: the same logits and cache as plain steps, in fixed tensors, at every degree.

Without a GPU, CUDA's way (padding to a few sizes) is played: a capture keeps the computation, and its
replay copies a new result into the old tensors.
"""

from __future__ import annotations

import mmap
import warnings
import weakref
from collections.abc import Callable
from itertools import islice
from typing import Any
from unittest import mock

import pytest
import torch
from generation_models import VOCAB_SIZE, tiny_model
from pool import RankPool
from torch import Tensor, nn

from tp import choice
from tp.errors import CapacityError, CommunicationError
from tp.generation import GenerationOptions
from tp.generation import decode_graphs as decode_graphs_module
from tp.generation import engine as engine_module
from tp.generation.decode_graphs import Capture, CaptureError, CudaGraph, DecodeGraphs, Replay, Run, capture_for
from tp.layers import KVCache, SequenceSlice, ShardedLogits, Step
from tp.models import initialise_parameters, prepare_for_inference
from tp.parallel import TensorParallelGroup
from tp.parallel.communicator import AloneCommunicator, NativeCommunicator, OrderedCommunicator

CAPACITY = 14
BATCHES = [
    [2],
    [2, 0, 3],
    [0, 3, 2],
    [2, 3, 1],
    [4, 3, 2, 1, 0],
    [0, 4, 2, 1],
    [0, 2, 1],
    [2, 3, 4, 0, 1],
    [0, 3, 2, 4, 1],
    [1, 4, 0],
    [1],
    [1],
]
"""Slots of each step. A sequence that is left out has ended, and the slot begins anew."""
QWEN3 = {"model_type": "qwen3", "qkv_bias": False, "qk_norm": True, "sliding_windows": (3, 3)}


class Played(CudaGraph):
    """What `CudaGraph` does, without CUDA."""

    def __call__(self, run: Run) -> tuple[Replay, ShardedLogits]:
        kept = run()
        return lambda: kept.local.copy_(run().local), kept


class Refused(Played):
    def __call__(self, run: Run) -> tuple[Replay, ShardedLogits]:
        run()
        raise CaptureError("it cannot")


def largest_differences(
    group: TensorParallelGroup, config: dict[str, Any], dtype: torch.dtype, way: str
) -> tuple[list[float], list[int]]:
    """Of each step's logits from the plain ones; the sizes captured."""
    model = tiny_model(group, config, dtype=dtype)
    if way == "int8":
        prepare_for_inference(model, "int8")
    capture: Capture | None = Played(group.communicator) if way == "played" else capture_for(model)
    assert capture is not None
    caches = [KVCache(model.config, group, 5, CAPACITY, dtype=dtype) for _ in range(2)]
    graphs = DecodeGraphs(model, caches[0], capture)
    statistics = group.communicator.statistics
    lengths = [0] * 5
    differences = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, slots in enumerate(BATCHES):
            token_ids = torch.tensor([(7 * slot + 3 * number) % VOCAB_SIZE for slot in slots])
            step = Step(token_ids, tuple(SequenceSlice(1, lengths[slot], slot) for slot in slots))
            statistics.reset()
            ours = graphs.next_token_logits(step).local.clone()  # before the model has run a step of its own
            collectives = [(statistics.calls, statistics.bytes)]
            statistics.reset()
            differences.append((ours - model.next_token_logits(step, caches[1]).local).abs().max().item())
            collectives.append((statistics.calls, statistics.bytes))
            lengths = [length + 1 if slot in slots else 0 for slot, length in enumerate(lengths)]
    for filled, plain in zip(caches[0].layers, caches[1].layers, strict=True):
        for slot, length in enumerate(lengths):
            torch.testing.assert_close(filled.key[slot, :, :length], plain.key[slot, :, :length])
    if way != "played":
        assert collectives[0] == collectives[1]
        assert (collectives[0][0] > 0) == (group.size > 1)
        assert (statistics.seconds > 0) == (group.size > 1)
    return differences, sorted(graphs._captured)


@pytest.mark.parametrize(
    "way, config, dtype",
    [
        ("own", {}, torch.float32),
        ("own", QWEN3, torch.bfloat16),
        ("int8", {"tie_word_embeddings": True}, torch.bfloat16),
        ("played", {}, torch.float32),
    ],
)
def test_logits_and_cache_are_those_of_plain_steps(
    ranks: RankPool, way: str, config: dict[str, Any], dtype: torch.dtype
) -> None:
    for tp_size in (1, 2, 3):
        for differences, sizes in ranks(tp_size).run(largest_differences, config, dtype, way):
            assert max(differences) == 0 if way != "played" else max(differences) < 1e-5
            assert sizes == ([1, 4, 5] if way == "played" else [1, 3, 4, 5]), "of a GPU those that come again"


@pytest.mark.parametrize(
    "communicator, dtype, head_dim, captured",
    [
        (NativeCommunicator, torch.bfloat16, 256, True),
        (AloneCommunicator, torch.float32, 64, True),
        (OrderedCommunicator, torch.bfloat16, 64, False),
        (NativeCommunicator, torch.float64, 64, False),
        (NativeCommunicator, torch.bfloat16, 320, False),
    ],
)
def test_on_cuda_only_what_a_graph_can_hold_is_captured(
    communicator: type, dtype: torch.dtype, head_dim: int, captured: bool
) -> None:
    model = mock.Mock(dtype=dtype)
    model.group.device, model.group.communicator = torch.device("cuda", 0), mock.Mock(spec=communicator)
    model.config.head_dim = head_dim
    assert isinstance(capture_for(model), CudaGraph) == captured


def test_few_captured_steps_are_kept() -> None:
    """Sequences that end one after the other leave steps of every size."""
    model = tiny_model(TensorParallelGroup.alone())
    capture = capture_for(model)
    assert capture is not None
    caches = [KVCache(model.config, model.group, 6, CAPACITY, dtype=model.dtype) for _ in range(2)]
    graphs = DecodeGraphs(model, caches[0], capture)
    lengths = [0] * 6
    with torch.no_grad():
        for size in (6, 6, 5, 5, 4, 4, 3, 3, 6, 2, 2, 5):
            step = Step(torch.arange(size), tuple(SequenceSlice(1, lengths[slot], slot) for slot in range(size)))
            lengths = [length + (slot < size) for slot, length in enumerate(lengths)]
            plain = model.next_token_logits(step, caches[1]).local
            assert torch.equal(graphs.next_token_logits(step).local, plain)
    assert list(graphs._captured) == [3, 6, 2, 5]


def ids_and_warnings(group: TensorParallelGroup, config: dict[str, Any]) -> tuple[list[tuple[int, ...]], list[str]]:
    model = tiny_model(group, config)
    prompts = [[5, 9, 2], [7], [1, 2, 3, 4, 5]]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = model.generate(prompts, GenerationOptions(15))
    return [sequence.new_ids for sequence in result.sequences], [str(warning.message) for warning in caught]


def ids_without(group: TensorParallelGroup, config: dict[str, Any]) -> list[tuple[int, ...]]:
    decode_graphs_module.enabled = lambda name: False
    try:
        return ids_and_warnings(group, config)[0]
    finally:
        from tp.choice import enabled

        decode_graphs_module.enabled = enabled


@pytest.mark.parametrize("config", [{}, {"activation": "relu"}])
def test_generation_is_the_same_with_and_without(ranks: RankPool, config: dict[str, Any]) -> None:
    expected = ranks(2).run(ids_without, config)[0]
    for ids, messages in ranks(2).run(ids_and_warnings, config):
        assert ids == expected
        assert not messages


def test_padding_takes_no_memory_and_nothing_from_sequences_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of one token, three in a step: it looks like a decode step, but others are in the cache already."""
    model = tiny_model(TensorParallelGroup.alone(), max_batch_size=7, max_context=12)
    prompts = [[5], [9], [7], [1], [3], [8], [1, 2, 3, 4, 5], [6, 2], [9, 8, 7, 6, 5, 4, 3, 2]]
    results = []
    for capture in (None, Played(model.group.communicator)):
        monkeypatch.setattr(engine_module, "capture_for", lambda model, capture=capture: capture)
        results.append(model.generate(prompts, GenerationOptions(9, prefill_chunk=3)))
    plain, played = results
    assert [sequence.new_ids for sequence in played.sequences] == [sequence.new_ids for sequence in plain.sequences]
    for ours, plains in zip(played.sequences, plain.sequences, strict=True):
        assert ours.logprobs == pytest.approx(plains.logprobs, abs=1e-5)
    assert played.kv_bytes == plain.kv_bytes == KVCache.bytes_needed(model.config, model.group, 7, 12, model.dtype)


def without_kernel(group: TensorParallelGroup) -> bool:
    """The same ids where decode attention is switched off: nothing may be captured, nor written, by its stand-in."""
    expected = ids_and_warnings(group, {})
    with mock.patch.object(choice, "_disabled", frozenset(["decode_attention"])):
        return ids_and_warnings(group, {}) == expected


def test_without_the_kernel_of_decode_attention_nothing_is_captured(ranks: RankPool) -> None:
    assert all(ranks(2).run(without_kernel))


def replay_after_close(group: TensorParallelGroup) -> str:
    model = tiny_model(group)
    cache = KVCache(model.config, group, 1, CAPACITY, dtype=model.dtype)
    capture = capture_for(model)
    assert capture is not None
    graphs = DecodeGraphs(model, cache, capture)
    with torch.no_grad():
        for start in range(3):
            graphs.next_token_logits(Step(torch.tensor([5]), (SequenceSlice(1, start, 0),)))
        group.close()
        with pytest.raises(CommunicationError) as raised:
            graphs.next_token_logits(Step(torch.tensor([5]), (SequenceSlice(1, 3, 0),)))
    return str(raised.value)


def test_a_closed_group_is_not_replayed(ranks: RankPool) -> None:
    assert ranks(2).run(replay_after_close) == ["the group was closed"] * 2


def test_a_full_cache_is_an_error() -> None:
    model = tiny_model(TensorParallelGroup.alone())
    cache = KVCache(model.config, model.group, 1, CAPACITY, dtype=model.dtype)
    with torch.no_grad(), pytest.raises(CapacityError, match="do not fit"):
        model.next_token_logits(Step(torch.tensor([5]), (SequenceSlice(1, CAPACITY, 0),)), cache)


def logits_after_a_refusal(group: TensorParallelGroup) -> tuple[bool, list[str]]:
    model = tiny_model(group)
    cache = KVCache(model.config, group, 3, CAPACITY, dtype=model.dtype)
    graphs = DecodeGraphs(model, cache, (Refused if group.rank == 1 else Played)(group.communicator))
    right = True
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for start in range(4):
            step = Step(torch.tensor([5 + start]), (SequenceSlice(1, start, 0),))
            expected = model.next_token_logits(step, cache)
            right &= torch.equal(graphs.next_token_logits(step).local, expected.local)
    return right and not graphs._captured, [str(warning.message) for warning in caught]


def test_a_capture_refused_on_one_rank_is_refused_on_all(ranks: RankPool) -> None:
    for right, messages in ranks(2).run(logits_after_a_refusal):
        assert right
        assert len(messages) == 1 and "it cannot" in messages[0]


def put_other_parameters(model: nn.Module, weights: list[Tensor]) -> None:
    """As int8 weights are put there."""
    left = iter(weights)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            setattr(module, name, None if parameter is None else nn.Parameter(next(left)))


def put_other_data(model: nn.Module, weights: list[Tensor]) -> None:
    """As `Module.to` and `Module.float` do, under the same parameters."""
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.data = weight


def put_a_vector(model: nn.Module, weights: list[Tensor]) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(weights), model.parameters())


WAYS = [put_other_parameters, put_other_data, put_a_vector]
Put = Callable[[nn.Module, list[Tensor]], None]


def copies(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def ids_with_weights_replaced(group: TensorParallelGroup, put: Put) -> list[int]:
    """4 tokens, then those of other weights."""
    model, other = tiny_model(group), tiny_model(group)
    initialise_parameters(other, seed=1, std=0.4)
    stream = model.generate_stream([[5, 9, 2]], GenerationOptions(12, ignore_eos=True))
    ids = [next(stream).token_id for _ in range(4)]
    put(model, copies(other))
    return ids + [event.token_id for event in stream]


def with_and_without(group: TensorParallelGroup, put: Put) -> tuple[list[int], list[int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replayed = ids_with_weights_replaced(group, put)
        with mock.patch.object(choice, "_disabled", frozenset(["decode_graphs"])):
            return replayed, ids_with_weights_replaced(group, put)


@pytest.mark.parametrize("put", WAYS)
@pytest.mark.parametrize("t", [1, 2])
def test_weights_that_are_replaced_meanwhile_are_used(ranks: RankPool, t: int, put: Put) -> None:
    for replayed, plain in ranks(t).run(with_and_without, put):
        assert replayed == plain


def with_weights_replaced_on_one_rank(group: TensorParallelGroup, put: Put) -> tuple[bool, list[str]]:
    """Rank 0 gets copies of its weights before a new batch size.

    Whether all logits are those of plain steps, and nothing is kept that was captured.
    """
    model = tiny_model(group)
    capture = capture_for(model)
    assert capture is not None
    caches = [KVCache(model.config, group, 2, CAPACITY, dtype=model.dtype) for _ in range(2)]
    graphs, right = DecodeGraphs(model, caches[0], capture), True
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, size in enumerate((2, 2, 2, 1, 1)):
            if number == 2 and group.rank == 0:
                put(model, copies(model))
            step = Step(torch.arange(size), tuple(SequenceSlice(1, number, slot) for slot in range(size)))
            ours = graphs.next_token_logits(step).local.clone()
            right = right and torch.equal(ours, model.next_token_logits(step, caches[1]).local)
    return right and not graphs._captured, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("put", WAYS)
def test_weights_replaced_on_one_rank_end_captures_on_all(ranks: RankPool, put: Put) -> None:
    for right, messages in ranks(2).run(with_weights_replaced_on_one_rank, put):
        assert right
        assert all("weights were replaced" in message for message in messages)


def in_memory_of_their_own(model: nn.Module) -> weakref.ref[mmap.mmap]:
    """Puts the weights into one map, as a loader does; the reference is empty once that is unmapped."""
    memory = mmap.mmap(-1, sum(parameter.nbytes for parameter in model.parameters()))
    sizes = [parameter.numel() for parameter in model.parameters()]
    parts = torch.frombuffer(memory, dtype=torch.float32).split(sizes)
    filled = [part.view_as(old).copy_(old.detach()) for part, old in zip(parts, model.parameters(), strict=True)]
    put_other_data(model, filled)
    return weakref.ref(memory)


@pytest.mark.filterwarnings("ignore:.*weights were replaced")
@pytest.mark.parametrize("put", WAYS)
def test_weights_that_were_replaced_are_kept_until_that_is_seen(put: Put) -> None:
    model = tiny_model(TensorParallelGroup.alone())
    memory = in_memory_of_their_own(model)
    stream = model.generate_stream([[5, 9, 2]], GenerationOptions(12, ignore_eos=True))
    for _ in range(3):
        next(stream)
    put(model, copies(model))
    assert memory() is not None, "what is replayed lies there"
    next(stream)
    assert memory() is None


@pytest.mark.filterwarnings("ignore:.*a module has hooks")
@pytest.mark.parametrize("hooked, tokens", [(False, 6), (True, 3)])
def test_a_stream_that_has_ended_or_captures_nothing_keeps_no_weights(hooked: bool, tokens: int) -> None:
    model = tiny_model(TensorParallelGroup.alone())
    if hooked:
        model.lm_head.register_forward_hook(lambda module, inputs, output: None)
    memory = in_memory_of_their_own(model)
    stream = model.generate_stream([[5, 9, 2]], GenerationOptions(6, ignore_eos=True))
    assert len(list(islice(stream, tokens))) == tokens
    put_other_data(model, copies(model))
    assert memory() is None


def calls_of_a_hook(group: TensorParallelGroup) -> tuple[int, list[str]]:
    model, outputs = tiny_model(group), []
    if group.rank == 0:
        model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.generate([[5, 9, 2]], GenerationOptions(12, ignore_eos=True))
    return len(outputs), [str(warning.message) for warning in caught]


def test_a_hook_on_one_rank_sees_every_step(ranks: RankPool) -> None:
    told = ["decode_graphs: the plain form is used: a module has hooks, which a captured step would not call"]
    assert ranks(2).run(calls_of_a_hook) == [(12, told), (0, told)]


def test_a_step_known_to_the_device_only() -> None:
    slots, starts = torch.tensor([4, 1]), torch.tensor([9, 2])
    step = Step.of_decode(torch.tensor([3, 8]), slots, starts)
    assert step.decodes
    assert step.slots is slots and step.positions() is starts
    assert step.last_rows().tolist() == [0, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_generation_on_cuda_is_the_same_with_and_without() -> None:
    group = TensorParallelGroup.alone("cuda")
    assert ids_and_warnings(group, {}) == (ids_without(group, {}), [])
