"""The ranks that one model is split over train on the same tokens; else its parts learn different things."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from tp.parallel.agreement import compare
from tp.parallel.group import TensorParallelGroup
from tp.training.data.packing import TrainingBatch


def check_same_batches(micro_batches: Sequence[TrainingBatch], group: TensorParallelGroup) -> None:
    """Compares digests over the ranks of a replica: one all-gather of two numbers. Every rank calls it.

    Raises:
        CommunicationError: they differ; on all ranks.
    """
    if group.size == 1:
        return
    own = torch.tensor([len(micro_batches), _digest(micro_batches)], device=group.device)
    gathered = group.communicator.all_gather_stacked(own).tolist()
    statements = [
        {"the number of micro-batches": str(count), "the tokens of the micro-batches": f"digest {digest:08x}"}
        for count, digest in gathered
    ]
    compare(group.communicator.global_ranks, statements)


def _digest(micro_batches: Sequence[TrainingBatch]) -> int:
    digest = 0
    for batch in micro_batches:
        for tensor in (batch.token_ids, batch.labels, torch.tensor(batch.sequence_lengths)):
            digest = zlib.crc32(tensor.cpu().contiguous().numpy().tobytes(), digest)
    return digest
