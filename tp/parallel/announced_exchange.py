"""Rows between all ranks over gloo, headed by the collective that they belong to.

gloo checks nothing of its own: ranks in different collectives add up each other's bytes, wait until a timeout, or are
aborted by a message that is longer than they expect. Here a rank reads first what its peers believe to be in. The
header rides in the message itself where that is short; every rank has room for `SHORT_BYTES`, whatever it expects.
Long rows follow in a second message.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tp.parallel.agreement import different_collectives

HEADER_BYTES = 96
"""A multiple of every element size, so that the rows behind it can be viewed in place."""
SHORT_BYTES = 64 * 1024
"""Rows for one rank that travel with their header."""
_DIGEST_BYTES = 8


def exchange(
    process_group: dist.ProcessGroup, announced: str, outgoing: Sequence[Tensor], receive: Sequence[int]
) -> list[Tensor]:
    """Sends `outgoing[r]` to each rank r and returns the rows that came from each, in rank order.

    Args:
        announced: the collective, with everything that must be equal on all ranks.
        outgoing: CPU tensors [rows, ...] of one dtype and trailing shape; may be strided.
        receive: rows that each rank is to send.

    Raises:
        CommunicationError: a peer is in another collective, or in this one with other shapes, dtype or sizes.
    """
    row_shape, dtype = outgoing[0].shape[1:], outgoing[0].dtype
    row_bytes = row_shape.numel() * dtype.itemsize
    short = max(*map(len, outgoing), *receive) * row_bytes <= SHORT_BYTES  # alike on ranks that are in one collective
    header = _header(announced)
    content = {id(rows): _bytes_of(rows) for rows in outgoing}  # often the same rows for all
    messages = [content[id(rows)] for rows in outgoing]
    came = _all_to_all(
        process_group,
        [torch.cat([header, message]) if short else header for message in messages],
        [HEADER_BYTES + SHORT_BYTES] * len(messages),
    )
    _check(process_group, [message[:HEADER_BYTES] for message in came], header)
    lengths = [rows * row_bytes for rows in receive]
    if short:
        came = [message[HEADER_BYTES : HEADER_BYTES + length] for message, length in zip(came, lengths, strict=True)]
    else:
        came = _all_to_all(process_group, messages, lengths)
    return [message.view(dtype).view(rows, *row_shape) for message, rows in zip(came, receive, strict=True)]


def _all_to_all(process_group: dist.ProcessGroup, messages: Sequence[Tensor], room: Sequence[int]) -> list[Tensor]:
    """Each rank's message, in rank order, with whatever fills the room behind it. This rank's own stays where it is."""
    own = dist.get_rank(process_group)
    sent = [0 if rank == own else len(message) for rank, message in enumerate(messages)]
    received = [0 if rank == own else length for rank, length in enumerate(room)]
    outgoing = torch.cat([message[:length] for message, length in zip(messages, sent, strict=True)])
    incoming = torch.empty(sum(received), dtype=torch.uint8, device="cpu")
    dist.all_to_all_single(incoming, outgoing, received, sent, group=process_group)
    came = list(incoming.split(received))
    came[own] = messages[own]
    return came


def _bytes_of(rows: Tensor) -> Tensor:
    return rows.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


@functools.lru_cache(maxsize=1024)
def _header(announced: str) -> Tensor:
    """The text, cut to what there is room for, and a digest of all of it."""
    text = announced.encode()
    digest = f"{zlib.crc32(text):0{_DIGEST_BYTES}x}".encode()
    content = digest + text[: HEADER_BYTES - _DIGEST_BYTES].ljust(HEADER_BYTES - _DIGEST_BYTES)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _check(process_group: dist.ProcessGroup, headers: Sequence[Tensor], own: Tensor) -> None:
    if all(torch.equal(header, own) for header in headers):
        return
    texts = [bytes(header[_DIGEST_BYTES:].tolist()).decode(errors="replace").strip() for header in headers]
    raise different_collectives(dist.get_process_group_ranks(process_group), texts)
