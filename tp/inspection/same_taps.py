"""Ranks that capture or edit differently are told so, before a forward computes what belongs to no model."""

from __future__ import annotations

import zlib

import torch

from tp.parallel.agreement import Statement, check_alike
from tp.parallel.group import TensorParallelGroup


def check_same_tap(group: TensorParallelGroup, statement: Statement) -> None:
    """Compares what the ranks ask for, by digest: one all-gather of a number. Every rank calls it.

    Words are exchanged only where the digests differ. A rank without such a tap is in another collective of tensors
    meanwhile, which the communicator tells.

    Raises:
        CommunicationError: on every rank, naming what differs.
    """
    digest = zlib.crc32(repr(sorted(statement.items())).encode())
    own = torch.tensor(digest, device=group.device)
    if len(set(group.communicator.all_gather_stacked(own).tolist())) > 1:
        check_alike(group.communicator, statement)
