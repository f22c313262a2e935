"""The cores that a process may run on; apart, so that the command line can count them without torch."""

from __future__ import annotations

import os


def own_cores() -> frozenset[int]:
    """The numbers of the cores that this process may run on; all of the machine where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
