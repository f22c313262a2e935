"""A check for debugging: what several ranks hold must be the same bits on all of them."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from tp.errors import CommunicationError
from tp.layers.parameter import named_parts
from tp.parallel.group import TensorParallelGroup


@torch.no_grad()
def check_replicas(model: nn.Module, group: TensorParallelGroup) -> None:
    """Compares every shared slice of every parameter, value and gradient, with that of its lowest holder.

    Raises:
        CommunicationError: names, on every rank, the first parameter that differs and the ranks that differ.
    """
    fingerprints: dict[tuple[str, str, int], bytes] = {}
    for parameter in named_parts(model):
        for part in parameter.parts:
            if len(part.sharers) > 1:
                for kind, tensor in (("value", parameter.tensor), ("gradient", parameter.tensor.grad)):
                    if tensor is not None:
                        rows = tensor.narrow(part.dim, part.local_start, part.length)
                        fingerprints[part.name, kind, part.global_start] = _fingerprint(rows)
    by_rank = group.communicator.all_gather_object(fingerprints)
    first: dict[tuple[str, str, int], tuple[int, bytes]] = {}
    for rank, prints in enumerate(by_rank):
        for key, fingerprint in prints.items():
            holder, expected = first.setdefault(key, (rank, fingerprint))
            if fingerprint != expected:
                name, kind, _ = key
                raise CommunicationError(
                    f"the {kind} of {name} differs between ranks {holder} and {rank}, which hold the same slice of it: "
                    "its gradient was not summed over the group, or an update was not the same"
                )


def _fingerprint(tensor: Tensor) -> bytes:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).digest()
