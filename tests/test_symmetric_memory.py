"""Sums through memory that all ranks read, which is played on the CPU; how a group of GPUs decides to use it."""

from __future__ import annotations

import pytest
import torch
from host_symmetric_memory import played_symmetric_memory

from tp.parallel import TensorParallelGroup, symmetric_memory
from tp.parallel.agreement import first_refusal
from tp.parallel.communicator import OrderedCommunicator
from tp.parallel.symmetric_memory import SymmetricMemoryCommunicator

CAPACITY = 4096
ONE_SHOT = 1024


def _process_group(group):
    assert group.process_group is not None
    return group.process_group


def sums_that_differ(group: TensorParallelGroup) -> list[str]:
    """Those of some dtypes and sizes, in one shot, in two, and too large, that are not gloo's ordered ones."""
    symmetric_memory.ONE_SHOT_BYTES, kept = ONE_SHOT, symmetric_memory.ONE_SHOT_BYTES
    process_group = _process_group(group)
    ours, ordered = played_symmetric_memory(process_group, CAPACITY), OrderedCommunicator(process_group)
    generator = torch.Generator().manual_seed(group.rank)
    differing = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for elements in (1, 3, 128, 129, 511, 512):
            x = (100 * torch.randn(elements, generator=generator)).to(dtype)
            before = x.clone()
            same = torch.equal(ours.all_reduce(x), ordered.all_reduce(x))
            if not (same and torch.equal(x, before)):
                differing.append(f"{elements} of {dtype}")
    strided = torch.randn(6, 8, generator=generator)[:, ::3].t()
    if not torch.equal(ours.all_reduce(strided), ordered.all_reduce(strided)):
        differing.append("strided")
    torch.testing.assert_close(ours.all_reduce(torch.ones(5000)), torch.full((5000,), float(group.size)))
    assert ours.statistics.calls == 3 * 6 + 2 and ours.statistics.bytes > 0
    ours.close()
    assert not ours.takes(strided)
    symmetric_memory.ONE_SHOT_BYTES = kept
    return differing


@pytest.mark.parametrize("t", [2, 3])
def test_sums_are_the_ordered_ones_bit_for_bit(ranks, t):
    assert ranks(t).run(sums_that_differ) == [[]] * t


def places_used(group: TensorParallelGroup, captured: list[bool]) -> tuple[list[int], int]:
    """Where in the memory each hand-over was put, and how many waits there were for all."""
    communicator = played_symmetric_memory(_process_group(group), CAPACITY)
    buffers = communicator._buffers
    assert buffers is not None
    waits = 0
    inner, start = buffers._wait, buffers._of_ranks[0].data_ptr()

    def wait() -> None:
        nonlocal waits
        waits += 1
        inner()

    buffers._wait = wait
    pretended = iter(captured)
    symmetric_memory.is_being_captured, kept = lambda _: next(pretended), symmetric_memory.is_being_captured
    places = [(int(buffers.hand_over(torch.ones(1)).addresses[0]) - start) // CAPACITY for _ in captured]
    symmetric_memory.is_being_captured = kept
    return places, waits


def test_a_capture_has_buffers_of_its_own_and_begins_with_a_wait(ranks):
    captured = [False, False, False, True, True, True, False, True]
    for places, waits in ranks(2).run(places_used, captured):
        assert places == [0, 1, 0, 2, 3, 2, 1, 3]
        assert waits == len(captured) + 2


def failures_of_trials(group: TensorParallelGroup) -> tuple[str | None, str | None]:
    """Of buffers as they should be, and of some in which rank 1 is seen where rank 0 should be."""
    buffers = played_symmetric_memory(_process_group(group), CAPACITY)._buffers
    assert buffers is not None
    good = symmetric_memory._failure_of_a_trial(buffers, torch.device("cpu"))
    buffers._of_ranks = [buffers._of_ranks[1]] * 2
    return good, symmetric_memory._failure_of_a_trial(buffers, torch.device("cpu"))


def test_a_trial_finds_memory_that_is_not_the_peers(ranks):
    for good, bad in ranks(2).run(failures_of_trials):
        assert good is None
        assert bad is not None and bad.endswith(
            ("read [0, 0] for the numbers of the ranks", "read [1, 1] for the numbers of the ranks")
        )


def test_two_ranks_read_everything_in_one_shot_and_more_only_what_is_small():
    def of_size(size: int) -> SymmetricMemoryCommunicator:
        communicator = SymmetricMemoryCommunicator.__new__(SymmetricMemoryCommunicator)
        communicator.size = size
        return communicator

    large = torch.empty(symmetric_memory.ONE_SHOT_BYTES + 1, dtype=torch.uint8)
    assert of_size(2).in_one_shot(large) and not of_size(3).in_one_shot(large)
    assert of_size(3).in_one_shot(large[1:])


@pytest.mark.parametrize(
    "hosts, off, reachable, refusal",
    [
        (["a", "a"], False, True, None),
        (["a", "b"], False, True, ""),
        (["a", "a"], True, True, ""),
        (["a", "a"], False, False, "the GPU of rank 0 cannot read the memory of rank 1's"),
    ],
)
def test_what_a_rank_refuses_for(monkeypatch, hosts, off, reachable, refusal):
    monkeypatch.setattr(symmetric_memory, "gpu_id", lambda index: f"gpu {index}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: reachable)
    places = [symmetric_memory._Place(host, f"gpu {index}", off) for index, host in enumerate(hosts)]
    assert symmetric_memory._refusal(places, 0, torch.device("cuda", 0)) == refusal
    hidden = [places[0], symmetric_memory._Place(hosts[0], "gpu 7", off)]
    if refusal != "":
        assert symmetric_memory._refusal(hidden, 0, torch.device("cuda", 0)) == (
            "" if off else "the GPU of rank 1 is not visible to rank 0"
        )


@pytest.mark.parametrize(
    "refusals, agreed", [([None, None], None), ([None, ""], ""), (["", "why"], "why"), ([None, "why"], "why")]
)
def test_a_refusal_with_a_reason_goes_first(refusals, agreed):
    assert first_refusal(refusals) == agreed
