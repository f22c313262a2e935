"""Which tokens of which sequences the next step processes: chunks of prompts, then one token of each sequence."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tp.generation.results import FinishReason
from tp.layers.step import SequenceSlice, Step


@dataclass
class SequenceState:
    """A sequence on its way; equal on all ranks.

    Attributes:
        index: which prompt it continues.
        prompt_ids: the prompt.
        new_ids, logprobs: generated so far.
        texts: pieces shown so far.
        num_cached: tokens whose keys and values are in the cache.
        slot: its row of the cache while it is running.
        first_token_at, last_token_at: on this rank's clock, in seconds.
    """

    index: int
    prompt_ids: tuple[int, ...]
    new_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    num_cached: int = 0
    slot: int = -1
    finish_reason: FinishReason | None = None
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    @property
    def decoding(self) -> bool:
        """Its prompt is in the cache; one token a step from here on."""
        return self.num_cached >= len(self.prompt_ids)


@dataclass(frozen=True)
class Piece:
    """Tokens of one sequence in one step.

    Attributes:
        state: the sequence.
        token_ids: those whose keys and values are not in the cache yet, or the first of them.
    """

    state: SequenceState
    token_ids: Sequence[int]

    @property
    def gives_token(self) -> bool:
        """The logits at its last token are those of a new token, not of one inside the prompt."""
        return self.state.num_cached + len(self.token_ids) >= len(self.state.prompt_ids)

    @property
    def slice(self) -> SequenceSlice:
        start, length = self.state.num_cached, len(self.token_ids)
        return SequenceSlice(length, start, self.state.slot, total=max(len(self.state.prompt_ids), start + length))


class Scheduler:
    """Deals out slots and steps, the same way on every rank.

    A waiting prompt takes a slot as soon as one is free. A step either processes chunks of prompts, in their order, or
    decodes one token of every running sequence; prompts go first.
    """

    def __init__(self, states: Sequence[SequenceState], num_slots: int, prefill_chunk: int) -> None:
        self._waiting = deque(states)
        self._running: list[SequenceState] = []
        self._free_slots = list(range(num_slots))
        self._prefill_chunk = prefill_chunk

    @property
    def unfinished(self) -> list[SequenceState]:
        return [*self._running, *self._waiting]

    def next_pieces(self) -> list[Piece]:
        """What the next step processes; `done` must be called once it has been."""
        while self._waiting and self._free_slots:
            state = self._waiting.popleft()
            state.slot = self._free_slots.pop(0)
            self._running.append(state)
        return self._chunks() or [Piece(state, state.new_ids[-1:]) for state in self._running]

    def done(self, pieces: Sequence[Piece]) -> None:
        """Notes that the pieces are in the cache, and frees the slots of sequences that have finished."""
        for piece in pieces:
            piece.state.num_cached += len(piece.token_ids)
        for state in [state for state in self._running if state.finish_reason is not None]:
            self._running.remove(state)
            self._free_slots.append(state.slot)

    def _chunks(self) -> list[Piece]:
        pieces = []
        budget = self._prefill_chunk
        for state in self._running:
            if not state.decoding and budget:
                token_ids = state.prompt_ids[state.num_cached : state.num_cached + budget]
                pieces.append(Piece(state, token_ids))
                budget -= len(token_ids)
        return pieces


def step_of(pieces: Sequence[Piece], device: torch.device) -> Step:
    """The flattened step that processes the pieces."""
    token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
    return Step(torch.tensor(token_ids, device=device), tuple(piece.slice for piece in pieces))
