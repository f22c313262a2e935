"""Memory that the ranks of a group on one host share: how they come by it, and what they see of each other in it.

One rank makes a file that has no name and lives in memory; the others open it through that process's descriptor in
/proc. So there is nothing that a killed run could leave behind. The rounds in which it is used are told in
tp/native/src/communicator_segment.h.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tp.choice import enabled, warn_once
from tp.cores import own_cores
from tp.errors import CommunicationError
from tp.native.library import NAME as LIBRARY
from tp.parallel.agreement import first_refusal
from tp.parallel.hosts import this_host
from tp.parallel.native_collectives import (
    CLOSED,
    OPEN,
    SEEN,
    Announcement,
    Counts,
    NativeCollectives,
    native_collectives,
)

NAME = "shared_memory"
"""For `tp.choice`."""
MOST_RANKS = 64
LARGEST_ELEMENT_BYTES = 16
ALIGNMENT_BYTES = 64
SPIN_NS = 200_000
"""How long a rank with a core of its own looks for its peers without pause, before it offers the core to others."""
SHARED_CORE_SPIN_NS = 5_000
"""The same where ranks share cores: the peer may wait for this very core."""

Gather = Callable[[Any], list[Any]]
"""Exchanges a picklable value with all ranks of the group."""


@dataclass(frozen=True)
class RankSeen:
    """A rank as another one sees it.

    Attributes:
        alive: its process has not ended.
        published: the last round that it has entered.
        is_open: it may still come. Else it has closed its group, or refuses further collectives after an error.
        closed: it has closed its group.
        announced: the collective that it announced for the round of the rank that looks, if it has entered that.
    """

    rank: int
    alive: bool
    published: int
    is_open: bool
    closed: bool
    process: int
    announced: Announcement

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process})"


class SharedSegment:
    """This rank's end of the memory. Forked children have no part in it: their parent still holds its place.

    Attributes:
        native: the C functions.
        counts: of the collectives of this end.
    """

    def __init__(
        self, native: NativeCollectives, endpoint: int, counts: Counts, rank: int, size: int, slot_bytes: int
    ) -> None:
        self.native = native
        self.counts = counts
        self._endpoint: int | None = endpoint
        self.rank = rank
        self.size = size
        self.slot_bytes = slot_bytes
        self._detach = weakref.finalize(self, native.detach, endpoint)
        self._detach.atexit = False  # a thread may still wait in it, and the kernel cleans up as well

    @property
    def endpoint(self) -> int:
        """What the C functions take; not to be kept.

        Raises:
            CommunicationError: it is closed, as by the handler of a signal that came in between.
        """
        if self._endpoint is None:
            raise CommunicationError("the group was closed inside a collective")
        return self._endpoint

    @property
    def round(self) -> int:
        """Rounds that this rank has entered."""
        return self.native.round(self.endpoint)

    def look(self, rank: int) -> RankSeen:
        seen, announced = SEEN(), Announcement()
        self.native.look(self.endpoint, rank, seen, announced)
        alive, published, presence, process = seen
        return RankSeen(rank, bool(alive), published, presence == OPEN, presence == CLOSED, process, announced)

    def everyone(self) -> Iterator[RankSeen]:
        return map(self.look, range(self.size))

    def give_up(self) -> None:
        """Tells the others not to wait for this rank."""
        if self._endpoint is not None:
            self.native.give_up(self._endpoint)

    def close(self) -> None:
        """Unmaps the memory and leaves this rank's place. Calling it again does nothing."""
        self._endpoint = None
        self._detach()

    def forget(self) -> None:
        """In a forked child: leaves everything to the parent."""
        self._endpoint = None
        self._detach.detach()


@dataclass(frozen=True)
class _Place:
    """Where the file is to be found: a descriptor of a process, and the random bytes that it begins with."""

    process: int
    descriptor: int
    token: bytes


@dataclass(frozen=True)
class _Offer:
    """What each rank tells the others first.

    Attributes:
        refusal: why it cannot share memory, for a warning; "" where nobody need be told; None if it can.
        place: from rank 0.
    """

    host: str
    cores: frozenset[int]
    refusal: str | None
    place: _Place | None


def share_memory(gather: Gather, rank: int, size: int, slot_bytes: int) -> SharedSegment | None:
    """Memory shared by all ranks of a group; to be called by all of them at the same time.

    Args:
        gather: an exchange of objects within the group.
        slot_bytes: how much a rank can hand over in one round; equal on all ranks.

    Returns:
        None, on all ranks, where any of them cannot take part; with a warning on rank 0 if the user can mend that.
    """
    slot_bytes = _whole_slot(slot_bytes, size)
    with ExitStack() as undo:
        offer, file = _offer(rank, size, slot_bytes, undo)
        offers: list[_Offer] = gather(offer)
        refusal = first_refusal([each.refusal for each in offers])
        if refusal is None and len({each.host for each in offers}) > 1:
            refusal = ""
        if refusal is not None:
            _warn(rank, refusal)
            return None
        segment, refusal = _attached(offers, file, rank, slot_bytes, undo)
        refusal = first_refusal(gather(refusal))
        if refusal is not None:
            _warn(rank, refusal)
            return None
        undo.pop_all()
    return segment


def _whole_slot(slot_bytes: int, size: int) -> int:
    """Room for an element for every rank, in whole cache lines."""
    needed = max(slot_bytes, LARGEST_ELEMENT_BYTES * size)
    return -(-needed // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _warn(rank: int, refusal: str) -> None:
    if refusal and rank == 0:
        warn_once(NAME, f"collectives go over gloo: {refusal}")


def _offer(rank: int, size: int, slot_bytes: int, undo: ExitStack) -> tuple[_Offer, int | None]:
    """What this rank tells the others, and on rank 0 the file that it made."""
    file = place = None
    refusal = _own_refusal(size)
    if rank == 0 and refusal is None:
        try:
            file, place = _new_file(size, slot_bytes, undo)
        except OSError as error:
            refusal = f"no memory can be shared: {error.strerror or error}"
    return _Offer(this_host(), own_cores(), refusal, place), file


def _own_refusal(size: int) -> str | None:
    if not (enabled(NAME) and enabled(LIBRARY)) or native_collectives() is None:  # the latter has warned already
        return ""
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create"
    return f"{size} ranks are more than the {MOST_RANKS} that can share memory" if size > MOST_RANKS else None


def _new_file(size: int, slot_bytes: int, undo: ExitStack) -> tuple[int, _Place]:
    native = native_collectives()
    assert native is not None
    file = os.memfd_create("tp-decoder")
    undo.callback(os.close, file)
    os.ftruncate(file, native.segment_bytes(size, slot_bytes))
    token = os.urandom(16)
    os.pwrite(file, token, 0)
    return file, _Place(os.getpid(), file, token)


def _attached(
    offers: list[_Offer], file: int | None, rank: int, slot_bytes: int, undo: ExitStack
) -> tuple[SharedSegment | None, str | None]:
    """This rank's end of the memory, or why there is none."""
    native, place = native_collectives(), offers[0].place
    assert native is not None and place is not None
    try:
        if file is None:
            file = os.open(f"/proc/{place.process}/fd/{place.descriptor}", os.O_RDWR | os.O_CLOEXEC)
            undo.callback(os.close, file)
        if os.pread(file, len(place.token), 0) != place.token:
            return None, f"rank {rank} sees another process {place.process} than rank 0"
        counts, error = Counts(), ctypes.c_int()
        endpoint = native.attach(file, rank, len(offers), slot_bytes, _spin_ns(offers), counts, ctypes.byref(error))
        if endpoint is None:
            raise OSError(error.value, os.strerror(error.value))
    except OSError as problem:
        return None, f"rank {rank} cannot open the memory of rank 0: {problem.strerror or problem}"
    undo.pop_all()  # the endpoint owns the file
    segment = SharedSegment(native, endpoint, counts, rank, len(offers), slot_bytes)
    undo.callback(segment.close)
    return segment, None


def _spin_ns(offers: list[_Offer]) -> int:
    cores = frozenset[int]().union(*(offer.cores for offer in offers))
    return SPIN_NS if len(cores) >= len(offers) else SHARED_CORE_SPIN_NS
