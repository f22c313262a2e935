"""Which machine a process runs on, and which of its cores."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path


@functools.cache  # stays true where files can no longer be opened
def this_host() -> str:
    """What tells this machine from others: its name, and on Linux the id of its boot, since names repeat."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{socket.gethostname()} {boot_id.read_text().strip()}"
    except OSError:
        return socket.gethostname()


def own_cores() -> frozenset[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
