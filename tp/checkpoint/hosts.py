"""Which ranks of a group run on the same machine."""

from __future__ import annotations

import socket
from pathlib import Path

from tp.parallel.group import TensorParallelGroup


def this_host() -> str:
    """What tells this machine from others: its name, and on Linux the id of its boot, since names repeat."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{socket.gethostname()} {boot_id.read_text().strip()}"
    except OSError:
        return socket.gethostname()


def ranks_on_this_host(group: TensorParallelGroup) -> list[int]:
    """The ranks of the group on the calling rank's machine, ascending. To be called by every rank."""
    hosts = group.communicator.all_gather_object(this_host())
    return [rank for rank, host in enumerate(hosts) if host == hosts[group.rank]]
