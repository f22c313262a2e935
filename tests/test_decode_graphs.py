"""Decode from captured steps: static tensors, padding to the captured sizes, and the check of the first logits.

Without a GPU a capture is played: it keeps the computation, and its replay copies a new result into the old tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from generation_models import tiny_model
from pool import RankPool

from tp.generation.decode_graphs import Capture, DecodeGraphs, Replay, capture_on_cuda
from tp.layers import KVCache, SequenceSlice, ShardedLogits, Step
from tp.parallel import TensorParallelGroup

CAPACITY = 8


def played(run: Callable[[], ShardedLogits]) -> tuple[Replay, ShardedLogits]:
    kept = run()
    return lambda: kept.local.copy_(run().local), kept


def played_wrongly(run: Callable[[], ShardedLogits]) -> tuple[Replay, ShardedLogits]:
    kept = run()
    return lambda: kept.local.copy_(run().local + 1), kept


def the_capture() -> Capture:
    return capture_on_cuda if torch.cuda.is_available() else played


@torch.no_grad()
def graphs_against_plain(group: TensorParallelGroup, batches: list[list[int]]) -> tuple[list[float], list[int]]:
    """Largest difference of each step's logits, and the sizes captured; a step has one token of the given slots."""
    model = tiny_model(group)
    caches = [KVCache(model.config, group, 6, CAPACITY, dtype=model.dtype, device=group.device) for _ in range(2)]
    graphs = DecodeGraphs(model, caches[0], the_capture())
    lengths = [0] * 5
    differences = []
    for number, slots in enumerate(batches):
        token_ids = torch.tensor([(7 * slot + 3 * number) % 97 for slot in slots], device=group.device)
        step = Step(token_ids, tuple(SequenceSlice(1, lengths[slot], slot) for slot in slots))
        plain = model.next_token_logits(step, caches[1]).local
        differences.append((graphs.next_token_logits(step).local - plain).abs().max().item())
        for slot in slots:
            lengths[slot] += 1
    for ours, plains in zip(caches[0].layers, caches[1].layers, strict=True):
        for slot, length in enumerate(lengths):
            torch.testing.assert_close(ours.key[slot, :, :length], plains.key[slot, :, :length])
    return differences, sorted(graphs._captured)


def test_logits_and_cache_are_those_of_plain_steps(ranks: RankPool) -> None:
    batches = [[2], [2, 0, 4], [1], [4, 3, 2, 1, 0], [0, 4, 2], [3, 1, 4, 2], [3], [0, 1, 2, 3, 4]]
    for tp_size in (1, 3):
        for differences, sizes in ranks(tp_size).run(graphs_against_plain, batches):
            assert max(differences) < 1e-5
            assert sizes == [1, 4, 5], "powers of two, at most the slots there are"


def logits_after_a_wrong_capture(group: TensorParallelGroup) -> tuple[bool, list[str]]:
    model = tiny_model(group)
    cache = KVCache(model.config, group, 3, CAPACITY, dtype=model.dtype, device=group.device)
    wrong = played_wrongly if group.rank == 1 else played
    graphs = DecodeGraphs(model, cache, wrong)
    right = True
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for start in range(3):
            step = Step(torch.tensor([5 + start], device=group.device), (SequenceSlice(1, start, 0),))
            expected = model.next_token_logits(step, cache)
            right &= torch.equal(graphs.next_token_logits(step).local, expected.local)
    return right, [str(warning.message) for warning in caught]


def test_a_wrong_capture_on_one_rank_is_refused_on_all(ranks: RankPool) -> None:
    for right, messages in ranks(2).run(logits_after_a_wrong_capture):
        assert right
        assert len(messages) == 1 and "cuda_graphs" in messages[0]


def test_a_step_known_to_the_device_only() -> None:
    slots, starts = torch.tensor([4, 1]), torch.tensor([9, 2])
    step = Step.of_decode(torch.tensor([3, 8]), slots, starts)
    assert step.decodes
    assert step.slots is slots and step.positions() is starts
    assert step.last_rows().tolist() == [0, 1]
    assert replace(step).num_tokens == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_capture_on_cuda_replays() -> None:
    group = TensorParallelGroup.alone("cuda")
    differences, _ = graphs_against_plain(group, [[0], [0], [1, 2], [1, 2]])
    assert max(differences) < 1e-4
