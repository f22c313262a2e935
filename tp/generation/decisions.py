"""What rank 0 decides at the end of a step, and the one broadcast that makes it everyone's decision."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass

import torch

from tp.generation.results import TokenEvent
from tp.parallel.group import TensorParallelGroup

LENGTH_BYTES = 8
ROOM = 128
"""Bytes that the broadcast has for a decision, and again for each of its tokens; what is longer needs a second one."""


@dataclass(frozen=True)
class Decision:
    """The outcome of a step, taken on rank 0.

    Attributes:
        events: the step's new tokens.
        cancelled: all sequences end here; there are no events.
        error: what went wrong on rank 0, for the other ranks; there are no events.
        not_finite: index of a sequence whose logits are not finite; there are no events.
    """

    events: tuple[TokenEvent, ...] = ()
    cancelled: bool = False
    error: str | None = None
    not_finite: int | None = None

    def to_bytes(self) -> bytes:
        return json.dumps(
            [[astuple(event) for event in self.events], self.cancelled, self.error, self.not_finite]
        ).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Decision:
        events, cancelled, error, not_finite = json.loads(content)
        return cls(tuple(TokenEvent(*event) for event in events), cancelled, error, not_finite)


def first_bytes(num_tokens: int) -> int:
    """Of the broadcast that makes a decision of so many tokens everyone's."""
    return LENGTH_BYTES + ROOM * (1 + num_tokens)


def share(decision: Decision | None, num_tokens: int, group: TensorParallelGroup) -> Decision:
    """Rank 0's decision on every rank: one broadcast, two where it holds unusually much text.

    Args:
        decision: on rank 0; elsewhere None.
        num_tokens: how many tokens the step gives, equal on all ranks.
    """
    if group.size == 1:
        assert decision is not None
        return decision
    content = decision.to_bytes() if decision else b""
    room = first_bytes(num_tokens) - LENGTH_BYTES
    first = _broadcast(len(content).to_bytes(LENGTH_BYTES, "little") + content[:room], LENGTH_BYTES + room, group)
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    received = first[LENGTH_BYTES : LENGTH_BYTES + length]
    if length > room:
        received += _broadcast(content[room:], length - room, group)
    return decision or Decision.from_bytes(received)


def _broadcast(content: bytes, size: int, group: TensorParallelGroup) -> bytes:
    buffer = torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)
    received = group.communicator.broadcast(buffer.to(group.device)).cpu()
    return received.numpy().tobytes()
