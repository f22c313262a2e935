"""Which ranks of a group run on the same machine."""

from __future__ import annotations

from tp.parallel.group import TensorParallelGroup
from tp.parallel.hosts import this_host

__all__ = ["ranks_on_this_host", "this_host"]


def ranks_on_this_host(group: TensorParallelGroup) -> list[int]:
    """The ranks of the group on the calling rank's machine, ascending. To be called by every rank."""
    hosts = group.communicator.all_gather_object(this_host())
    return [rank for rank, host in enumerate(hosts) if host == hosts[group.rank]]
