"""Degrees as a user writes them: "4", "1,2,4", "1-8"."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launch.arguments import positive
from tp.planning.hardware import ANY_DEGREE, MOST_RANKS

if TYPE_CHECKING:
    from tp.planning.plan import Workload


@dataclass(frozen=True)
class Degrees:
    """Numbers that were named, and numbers of ranges: of those, only what the machine can place is planned."""

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
            ConfigError, RequestError: a number that was named, or a whole range, that cannot be placed.
        """
        for degree in (*self.named, *([] if self._placed(workload) or self.named else self.ranged[:1])):
            workload.nodes_of(degree)
        return sorted({*self.named, *self._placed(workload)})

    def _placed(self, workload: Workload) -> Sequence[int]:
        heads, nodes = workload.config.num_attention_heads, workload.nodes
        return [d for d in self.ranged if d <= heads and workload.profile.nodes_for(d, nodes) is not None]


def usual_degrees(workload: Workload) -> list[int]:
    """Powers of two up to all ranks of all nodes, or what the profile was measured at; none above the query heads."""
    profile = workload.profile
    most = min(workload.config.num_attention_heads, profile.ranks_per_node * workload.nodes)
    powers = [2**exponent for exponent in range(most.bit_length())]
    measured = [degree for degree in sorted(profile.rates) if degree != ANY_DEGREE]
    known = powers if ANY_DEGREE in profile.rates else measured
    return [d for d in known if d <= most and profile.nodes_for(d, workload.nodes) is not None]
