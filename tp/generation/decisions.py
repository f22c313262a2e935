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
class NewTokens:
    """The step's new tokens."""

    events: tuple[TokenEvent, ...] = ()


@dataclass(frozen=True)
class Cancelled:
    """All sequences end here."""


@dataclass(frozen=True)
class Failed:
    """What went wrong on rank 0, for the other ranks."""

    reason: str


@dataclass(frozen=True)
class NotFinite:
    """Index of a sequence whose logits are not finite."""

    index: int


Decision = NewTokens | Cancelled | Failed | NotFinite
"""The outcome of a step, taken on rank 0."""


def to_bytes(decision: Decision) -> bytes:
    """For the broadcast."""
    return json.dumps([type(decision).__name__, astuple(decision)]).encode()


def from_bytes(content: bytes) -> Decision:
    """What `to_bytes` was given."""
    name, values = json.loads(content)
    if name == NewTokens.__name__:
        return NewTokens(tuple(TokenEvent(*event) for event in values[0]))
    kinds = {kind.__name__: kind for kind in (Cancelled, Failed, NotFinite)}
    return kinds[name](*values)


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
    content = to_bytes(decision) if decision else b""
    room = first_bytes(num_tokens) - LENGTH_BYTES
    first = _broadcast(len(content).to_bytes(LENGTH_BYTES, "little") + content[:room], LENGTH_BYTES + room, group)
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    received = first[LENGTH_BYTES : LENGTH_BYTES + length]
    if length > room:
        received += _broadcast(content[room:], length - room, group)
    return decision or from_bytes(received)


def _broadcast(content: bytes, size: int, group: TensorParallelGroup) -> bytes:
    buffer = torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)
    received = group.communicator.broadcast(buffer.to(group.device)).cpu()
    return received.numpy().tobytes()
