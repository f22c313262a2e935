"""Slots, chunks, turns and decisions: the bookkeeping of generation, checked without a model."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from generation_models import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import RankPool

from tp.generation.cache_plan import Room, plan_cache
from tp.generation.decisions import Cancelled, Decision, Failed, NewTokens, NotFinite, from_bytes, share, to_bytes
from tp.generation.results import TokenEvent
from tp.generation.scheduler import Scheduler, SequenceState, step_of
from tp.parallel import TensorParallelGroup


def states_of(lengths: list[int]) -> list[SequenceState]:
    return [SequenceState(index, tuple(100 * index + i for i in range(n))) for index, n in enumerate(lengths)]


def serve(states: list[SequenceState], num_slots: int, chunk: int, new: list[int]) -> list[list[tuple[int, int, int]]]:
    """Runs until every sequence has its number of new tokens; (index, start, length) of each step's pieces."""
    scheduler = Scheduler(states, num_slots, chunk)
    steps = []
    cached: dict[int, list[int]] = {state.index: [] for state in states}
    while scheduler.unfinished:
        pieces = scheduler.next_pieces()
        step = step_of(pieces, device=None)  # type: ignore[arg-type]
        assert step.num_tokens == sum(piece.slice.length for piece in pieces) > 0
        slots = [piece.slice.slot for piece in pieces]
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(num_slots))
        for piece, row in zip(pieces, step.last_rows().tolist(), strict=True):
            assert step.token_ids[row] == piece.token_ids[-1]
            assert piece.slice.start == len(cached[piece.state.index])
            cached[piece.state.index] += piece.token_ids
        for piece in pieces:
            state = piece.state
            if piece.gives_token:
                state.new_ids.append(7000 + len(state.new_ids))
                state.finish_reason = "length" if len(state.new_ids) == new[state.index] else None
        steps.append([(piece.state.index, piece.slice.start, piece.slice.length) for piece in pieces])
        scheduler.done(pieces)
    for state in states:  # everything but the last new token went through the model, once and in order
        assert cached[state.index] == [*state.prompt_ids, *state.new_ids[:-1]]
    return steps


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 5)), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(1, 12),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_every_token_goes_through_once(sizes: list[tuple[int, int]], num_slots: int, chunk: int) -> None:
    steps = serve(states_of([length for length, _ in sizes]), num_slots, chunk, [new for _, new in sizes])
    prompts = sum(length for length, _ in sizes)
    lengths_of = [sum(length for *_, length in step) for step in steps]
    assert sum(lengths_of) == prompts + sum(new - 1 for _, new in sizes)
    assert max(lengths_of) <= max(chunk, num_slots)


def test_a_freed_slot_is_taken_by_the_next_prompt() -> None:
    steps = serve(states_of([3, 2, 4]), num_slots=2, chunk=4, new=[3, 1, 2])
    assert steps == [
        [(0, 0, 3), (1, 0, 1)],  # a chunk of 4 tokens over the batch
        [(1, 1, 1)],  # the rest of prompt 1, which then has its one token
        [(2, 0, 4)],
        [(0, 3, 1), (2, 4, 1)],
        [(0, 4, 1)],
    ]


def test_the_whole_prompt_is_known_while_a_chunk_of_it_runs() -> None:
    (state,) = states_of([9])
    scheduler = Scheduler([state], 1, 4)
    totals = []
    for _ in range(3):
        (piece,) = pieces = scheduler.next_pieces()
        totals.append((piece.slice.total, piece.gives_token))
        scheduler.done(pieces)
    assert totals == [(9, False), (9, False), (9, True)]


@pytest.mark.parametrize(
    "tokens, expected",
    [(400, (4, 100)), (399, (4, 99)), (80, (4, 20)), (79, (3, 20)), (20, (1, 20))],
)
def test_a_cache_that_does_not_fit_shrinks_to_what_is_needed(tokens: int, expected: tuple[int, int]) -> None:
    rooms = [Room(free, 1, 0, 0, 0) for free in (10**6, tokens)]
    assert plan_cache(rooms, num_slots=4, capacity=100, needed=20, step_tokens=7) == expected


@pytest.mark.parametrize(
    "free, expected",
    [
        (7 * (30 + 20 * 2) + 7 * 5 + 4 * (100 * 10 + 35), (4, 100)),
        (7 * (30 + 20 * 2) + 7 * 5 + 4 * (100 * 10 + 35) - 1, (4, 99)),
        (7 * (30 + 20 * 2) + 7 * 5 + 4 * (20 * 10 + 35) - 1, (3, 20)),
        (7 * (30 + 20 * 2) + 7 * 5 + 20 * 10 + 35, (1, 20)),
        (7 * (30 + 20 * 2) + 7 * 5 + 20 * 10 + 34, (0, 20)),
        (5, (0, 20)),
    ],
)
def test_a_cache_leaves_room_for_steps(free: int, expected: tuple[int, int]) -> None:
    """Of 7 tokens of prompts, and of one token of each slot."""
    room = Room(free, cached_token=10, step_token=30, seen_token=2, logits_row=5)
    assert plan_cache([room], num_slots=4, capacity=100, needed=20, step_tokens=7) == expected


@pytest.mark.parametrize("device, free", [("cpu", 3200), ("cuda", 3100)])
def test_on_a_gpu_a_part_of_the_memory_is_left(device: str, free: int) -> None:
    model = tiny_model(TensorParallelGroup.alone())
    model.group = mock.Mock(rank=0, size=1, device=torch.device(device))
    assert Room.of(model, 3200).free == free


def test_a_decision_survives_its_journey() -> None:
    events = (TokenEvent(0, 151_000, '好"\n\0🙂', -0.123456789012345), TokenEvent(3, 0, "", -1e-30, "stop"))
    for decision in (NewTokens(events), NewTokens(), Cancelled(), Failed("rank 0 raised ValueError: ä"), NotFinite(2)):
        assert from_bytes(to_bytes(decision)) == decision


LONG = NewTokens((TokenEvent(0, 1, "x🙂" * 3000, -0.5), TokenEvent(1, 2, "y", -1.5, "stop")))
DECISIONS = [LONG, NewTokens(), LONG, Failed("z" * 1000), Cancelled()]


def _share(group: TensorParallelGroup) -> tuple[list[Decision], int]:
    shared = [share(d if group.rank == 0 else None, 2 if d is LONG else 0, group) for d in DECISIONS]
    return shared, group.communicator.statistics.calls


def test_every_rank_gets_the_decision_however_long_it_is(ranks: RankPool) -> None:
    assert ranks(3).run(_share) == [(DECISIONS, 5 + 3)] * 3  # the three long ones take a second broadcast
