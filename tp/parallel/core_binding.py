"""Cores of its own for each CPU rank: one that moves leaves what is in its caches, and on another socket its memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tp.choice import enabled, warn_once
from tp.cores import own_cores
from tp.parallel.communicator import Communicator
from tp.parallel.hosts import this_host

NAME = "core_binding"
"""For `tp.choice`."""


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs.

    Attributes:
        host: as `this_host`.
        cores: that its process may use.
        threads: that torch computes with.
        enabled: whether its user leaves binding on.
    """

    host: str
    cores: frozenset[int]
    threads: int
    enabled: bool

    @classmethod
    def here(cls) -> RankPlace:
        """This process."""
        return cls(this_host(), own_cores(), torch.get_num_threads(), enabled(NAME))


def bind_to_own_cores(communicator: Communicator) -> None:
    """Binds this thread, and those that it starts from now on, to its rank's share of the host's cores.

    Every rank calls it. Nothing changes where `share_of_cores` gives none.
    """
    places = communicator.all_gather_object(RankPlace.here())
    share = share_of_cores(places, communicator.rank)
    if share is None or not hasattr(os, "sched_setaffinity"):  # Linux has it
        return
    try:
        os.sched_setaffinity(0, share)
    except OSError as error:
        warn_once(NAME, f"this process may not choose its cores: {error.strerror}")


def share_of_cores(places: Sequence[RankPlace], rank: int) -> frozenset[int] | None:
    """The cores of one rank: as many for each of its host, neighbours by number.

    None where the host's ranks do not all have the same cores, since something else has dealt them out; where threads
    would be more than cores; and where binding is off, or the rank is alone.

    Args:
        places: of all ranks, in their order.
    """
    own = places[rank]
    here = [index for index, place in enumerate(places) if place.host == own.host]
    each = len(own.cores) // len(here)
    alike = all(places[index].cores == own.cores and places[index].enabled for index in here)
    if len(here) == 1 or not alike or max(places[index].threads for index in here) > each:
        return None
    first = here.index(rank) * each
    return frozenset(sorted(own.cores)[first : first + each])
