"""Symmetric memory played by files that processes of one host map, for ranks on the CPU."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from tp.parallel.symmetric_memory import PLACES, SymmetricBuffers, SymmetricMemoryCommunicator


def played_symmetric_memory(process_group: dist.ProcessGroup, capacity: int) -> SymmetricMemoryCommunicator:
    """A communicator whose sums of up to `capacity` bytes go through shared files, and the others to the group.

    Called by all ranks of the group at once.
    """
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    agreed = [tempfile.mkdtemp(prefix="played-symmetric-") if rank == 0 else ""]
    dist.broadcast_object_list(agreed, group=process_group, group_src=0)
    files = [Path(agreed[0]) / str(peer) for peer in range(size)]
    memories = [
        torch.from_file(str(file), shared=True, size=PLACES * capacity, dtype=torch.uint8) for file in files
    ]  # fmt: skip
    dist.barrier(process_group)
    if rank == 0:
        for file in files:
            file.unlink()
        files[0].parent.rmdir()
    return SymmetricMemoryCommunicator(
        process_group, SymmetricBuffers(memories, rank, lambda: dist.barrier(process_group))
    )
