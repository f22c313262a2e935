"""The collectives that are timed over the link, and what the planner's model says that a longer link adds to them.

A step of an algorithm costs the link's α. `OrderedCommunicator` exchanges addends over gloo, whose receiver first says
that it is ready, and only then is sent to: so α is a round trip, two delays. An all-reduce takes one step up to
`ONE_SHOT_BYTES`, and above a reduce-scatter and an all-gather: two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tp.config import ModelConfig
from tp.parallel.communicator import ONE_SHOT_BYTES
from tp.planning.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Link, one_shot, two_shot
from tp.planning.parameters import rank_models
from tp.planning.precision import Precision
from tp.planning.step_collectives import Collective, step_collectives

RANKS = 4
TRIPS_A_STEP = 2


@dataclass(frozen=True)
class Case:
    """A collective of `nbytes` in all."""

    operation: str
    nbytes: int

    @property
    def name(self) -> str:
        return f"{self.operation} of {self.nbytes // 1024} KiB"


CASES = (
    Case(ALL_GATHER, 4096),
    Case(REDUCE_SCATTER, 4096),
    Case(ALL_REDUCE, 4096),
    Case(ALL_REDUCE, 4 * ONE_SHOT_BYTES),
)


def added_s(operation: str, nbytes: int, delay_s: float) -> float:
    """What a link with `delay_s` more each way adds to a collective, by the planner's α-β model."""
    longer = Link(latency_s=TRIPS_A_STEP * delay_s, bytes_per_s=math.inf)
    whole = one_shot(operation, nbytes, RANKS, longer)
    if operation != ALL_REDUCE or nbytes <= ONE_SHOT_BYTES:
        return whole.seconds
    cost = two_shot(operation, nbytes, RANKS, longer)
    assert cost is not None
    return cost.seconds


def decode_collectives(config: ModelConfig) -> tuple[Collective, ...]:
    """Those of a decode step of one sequence in float32, as the planner counts them."""
    model = rank_models(config, Precision.of("float32"), RANKS)[0]
    return step_collectives(model, tokens=1, sharded=False, num_logits=1, num_sampled=1)


def added_to_step_s(collectives: Iterable[Collective], delay_s: float) -> float:
    """What such a link adds to a step: its collectives follow one another."""
    return sum(each.count * added_s(each.operation, each.nbytes, delay_s) for each in collectives)


def slope(delays_s: Sequence[float], seconds: Sequence[float]) -> float:
    """Least squares: seconds for each second of delay.

    Raises:
        ValueError: fewer than two different delays.
    """
    middle = sum(delays_s) / len(delays_s)
    spread = sum((delay - middle) ** 2 for delay in delays_s)
    if spread == 0.0:
        raise ValueError("a slope needs two different delays")
    return sum((delay - middle) * time for delay, time in zip(delays_s, seconds, strict=True)) / spread
