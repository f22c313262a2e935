"""Degrees as a user writes them: "4", "1,2,4", "1-8"."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launch.arguments import positive
from tp.planning.hardware import ANY_DEGREE, MOST_RANKS

if TYPE_CHECKING:
    from tp.planning.plan import Workload


@dataclass(frozen=True)
class Degrees:
    """Numbers that were named, and numbers of ranges: of those, only what the machine can do is planned."""

    named: tuple[int, ...]
    ranged: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Degrees:
        """The type of --tp.

        Raises:
            ArgumentTypeError: not a list of positive numbers and rising ranges of them.
        """
        named: list[int] = []
        ranged: list[int] = []
        for part in text.split(","):
            first, dash, last = part.partition("-")
            low, high = positive(first), positive(last) if dash else 0
            if dash and not low <= high <= MOST_RANKS:
                raise argparse.ArgumentTypeError(f"{part!r} is not a range such as 1-8, up to {MOST_RANKS}")
            named += [] if dash else [low]
            ranged += range(low, high + 1) if dash else []
        return cls(tuple(named), tuple(ranged))

    def on(self, workload: Workload) -> list[int]:
        """In ascending order.

        Raises:
            ConfigError, RequestError: a number that was named, or a whole range, that cannot be planned.
        """
        found = sorted({*self.named, *_plannable(self.ranged, workload)})
        for degree in (*self.named, *(() if found else self.ranged[:1])):
            workload.nodes_of(degree)
            workload.profile.rates_of(degree)
        return found


def usual_degrees(workload: Workload) -> list[int]:
    """Powers of two up to all ranks of all nodes, or what the profile was measured at; none above the query heads.

    Raises:
        ConfigError, RequestError: the profile was measured only where this model cannot be.
    """
    profile = workload.profile
    powers = [2**exponent for exponent in range((profile.ranks_per_node * workload.nodes).bit_length())]
    measured = sorted(degree for degree in profile.rates if degree != ANY_DEGREE)
    known = powers if ANY_DEGREE in profile.rates else measured
    found = _plannable(known, workload)
    if not found:
        workload.nodes_of(known[0])
    return found


def _plannable(degrees: Iterable[int], workload: Workload) -> list[int]:
    """Those of enough query heads, of which the nodes hold as many ranks each, at rates that are known."""
    profile = workload.profile
    return [
        degree
        for degree in degrees
        if degree <= workload.config.num_attention_heads
        and profile.nodes_for(degree, workload.nodes) is not None
        and profile.has_rates_of(degree)
    ]
