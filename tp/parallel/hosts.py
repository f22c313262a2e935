"""Which machine a process runs on, and on which GPU."""

from __future__ import annotations

import functools
import socket
from pathlib import Path

import torch


@functools.cache  # stays true where files can no longer be opened
def this_host() -> str:
    """What tells this machine from others: its name, and on Linux the id of its boot, since names repeat."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{socket.gethostname()} {boot_id.read_text().strip()}"
    except OSError:
        return socket.gethostname()


def gpu_id(device: torch.device | int) -> str:
    """What tells a GPU from all others: two processes may each see another one as their first."""
    return str(torch.cuda.get_device_properties(device).uuid)
