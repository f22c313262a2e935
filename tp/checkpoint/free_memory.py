"""How much memory a rank may take: of its GPU, or of the machine and of the control group that it runs in."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from tp.parallel.group import TensorParallelGroup
from tp.parallel.hosts import gpu_id, this_host


def free_memory(group: TensorParallelGroup) -> int:
    """This rank's share, in bytes, of what is free where its tensors live. Every rank calls it.

    Ranks on one machine (or on one GPU) share evenly. To be asked before any of them allocates.
    """
    on_gpu = group.device.type == "cuda"
    place = (this_host(), gpu_id(group.device) if on_gpu else "")
    sharers = group.communicator.all_gather_object(place).count(place)
    if on_gpu:
        # torch keeps what earlier tensors took, and gives it again
        kept = torch.cuda.memory_reserved(group.device) - torch.cuda.memory_allocated(group.device)
        return int(torch.cuda.mem_get_info(group.device)[0]) // sharers + kept
    return free_host_memory() // sharers


def free_host_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process could still take without swapping: the machine's, or less by control group.

    Args:
        proc, cgroups: where Linux shows its memory and its control groups.
    """
    return min([_available(proc), *_left_in_cgroups(proc, cgroups)])


def _available(proc: Path) -> int:
    """MemAvailable: free pages and those of caches that can be dropped."""
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return sys.maxsize  # an operating system that does not say


def _left_in_cgroups(proc: Path, cgroups: Path) -> Iterator[int]:
    """What each limited control group above this process has left; caches that can be dropped count as left."""
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            root = cgroups
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = cgroups / "memory"
        else:
            continue
        group = root / path.strip("/")
        for place in (group, *group.parents):
            if place.is_relative_to(root):
                yield from _left_in(place, *names)


def _left_in(place: Path, limit_file: str, usage_file: str, cache_key: str) -> Iterator[int]:
    limit, usage = _lines(place / limit_file), _lines(place / usage_file)
    if not limit or not usage or limit[0] == "max":
        return
    cached = [int(line.split()[1]) for line in _lines(place / "memory.stat") if line.split()[:1] == [cache_key]]
    yield max(0, int(limit[0]) - int(usage[0]) + sum(cached))


def _lines(path: Path) -> list[str]:
    """Lines of a file; none where it is not there."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
