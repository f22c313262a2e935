"""What a group's communicator does between two moments, by its own clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from launch.measurement.requests import Communication

if TYPE_CHECKING:
    from tp.parallel.communicator import Communicator


@dataclass(frozen=True)
class Reading:
    """The counters of one rank at one moment, or the difference of two readings."""

    calls: int
    bytes: int
    seconds: float

    @classmethod
    def of(cls, communicator: Communicator) -> Reading:
        """Now. On CUDA it waits for the collectives begun so far."""
        statistics = communicator.statistics
        return cls(statistics.calls, statistics.bytes, statistics.seconds)

    def since(self, earlier: Reading) -> Reading:
        """What happened between `earlier` and this one."""
        return Reading(self.calls - earlier.calls, self.bytes - earlier.bytes, self.seconds - earlier.seconds)


def of_all_ranks(reading: Reading, communicator: Communicator) -> Communication | None:
    """This rank's counts with every rank's seconds; None for a rank that is alone. Every rank calls it."""
    if communicator.size == 1:
        return None
    return Communication(reading.calls, reading.bytes, tuple(communicator.all_gather_object(reading.seconds)))
