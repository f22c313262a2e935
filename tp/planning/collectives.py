"""What collectives cost, by algorithm: seconds that do not depend on the size, and seconds that do.

With t ranks, a message of n bytes (what an all-reduce and a reduce-scatter take, what an all-gather gives), and a link
of latency α and β bytes a second in each direction (Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective
Communication Operations in MPICH"):

    ring                t − 1 steps of n/t;  all-reduce: both halves      2(t − 1)·α + 2(t − 1)/t · n/β
    tree                reduce up, broadcast down                         2⌈log₂ t⌉·α + 2n/β, pipelined
    recursive halving   log₂ t steps of n/2, n/4, …; and back             2 log₂ t · α + 2(t − 1)/t · n/β
    one shot            each rank reads every other's whole message       α + (t − 1)·n/β
    two shot            a rank sums its n/t, then reads the others' sums  2α + 2(t − 1)/t · n/β
    hierarchical        reduce-scatter in each node, all-reduce between   sum of the three
                        nodes, all-gather in each node

An algorithm that cuts a message into chunks and sends them one after the other through p stages has filled them after
p chunks. With the best number of chunks that takes (√(p·α) + √(n/β))² = p·α + 2√(p·α·n/β) + n/β: between latency and
bandwidth stands a *ramp*, which grows with √n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

OPERATIONS = ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST = (
    "all_reduce", "reduce_scatter", "all_gather", "broadcast"
)  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """What one collective takes.

    Attributes:
        latency_s: what it takes whatever its size.
        bandwidth_s: what its bytes add.
        method: the algorithm.
    """

    latency_s: float
    bandwidth_s: float
    method: str

    @property
    def seconds(self) -> float:
        return self.latency_s + self.bandwidth_s


@dataclass(frozen=True)
class Link:
    """What joins two ranks.

    Attributes:
        latency_s: from one rank's write to the other's read.
        bytes_per_s: of one rank, in each direction.
    """

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Line:
    """Measured times of one collective as α + ρ·√n + n/β, none of them negative.

    Attributes:
        latency_s: α. ramp_s: ρ, seconds a √byte. s_per_byte: 1/β.
    """

    latency_s: float
    ramp_s: float
    s_per_byte: float

    def cost(self, nbytes: int, method: str = "measured") -> Cost:
        """Of a message."""
        return Cost(self.latency_s, self.ramp_s * math.sqrt(nbytes) + self.s_per_byte * nbytes, method)


def ring(operation: str, nbytes: int, ranks: int, link: Link) -> Cost:
    """Every rank passes pieces to the next one. A broadcast goes around once, in chunks."""
    if operation == BROADCAST:
        return Cost((ranks - 1) * link.latency_s, nbytes / link.bytes_per_s, "ring")
    steps = (ranks - 1) * _halves(operation)
    return Cost(steps * link.latency_s, steps / ranks * nbytes / link.bytes_per_s, "ring")


def tree(operation: str, nbytes: int, ranks: int, link: Link) -> Cost | None:
    """Up to a root and down again, or only down; None for what leaves each rank another part."""
    if operation not in (ALL_REDUCE, BROADCAST):
        return None
    ways = 2 if operation == ALL_REDUCE else 1
    return Cost(ways * _levels(ranks) * link.latency_s, ways * nbytes / link.bytes_per_s, "tree")


def recursive_halving(operation: str, nbytes: int, ranks: int, link: Link) -> Cost | None:
    """Partners at half the distance exchange halves; ranks above a power of two hand over and get back whole ones."""
    if operation == BROADCAST:
        return None
    halves, power = _halves(operation), 2 ** (ranks.bit_length() - 1)
    latency = halves * math.log2(power) * link.latency_s
    bandwidth = halves * (power - 1) / power * nbytes / link.bytes_per_s
    if power < ranks:
        latency, bandwidth = latency + 2 * link.latency_s, bandwidth + 2 * nbytes / link.bytes_per_s
    return Cost(latency, bandwidth, "recursive halving")


def one_shot(operation: str, nbytes: int, ranks: int, link: Link) -> Cost:
    """Everyone reads what it needs from everyone, after one wait."""
    needed = {ALL_REDUCE: ranks - 1.0, BROADCAST: 1.0}.get(operation, (ranks - 1) / ranks)
    return Cost(link.latency_s, needed * nbytes / link.bytes_per_s, "one shot")


def two_shot(operation: str, nbytes: int, ranks: int, link: Link) -> Cost | None:
    """An all-reduce as a reduce-scatter and an all-gather, each in one shot."""
    if operation != ALL_REDUCE:
        return None
    return Cost(2 * link.latency_s, 2 * (ranks - 1) / ranks * nbytes / link.bytes_per_s, "two shot")


Algorithm = Callable[[str, int, int, Link], Cost | None]
"""(operation, bytes, ranks, link) → cost; None where it has no such operation."""

ALGORITHMS: Mapping[str, Algorithm] = {
    "ring": ring,
    "tree": tree,
    "recursive_halving": recursive_halving,
    "one_shot": one_shot,
    "two_shot": two_shot,
}


def hierarchical(
    operation: str, nbytes: int, nodes: int, ranks_per_node: int, within: Algorithm, inner: Link, outer: Link
) -> Cost | None:
    """First within each node, then a ring between the ranks of equal place in all nodes, then within again.

    Args:
        within: the algorithm of a node's ranks.
        inner, outer: what joins ranks of a node, and of two nodes.
    """
    share = math.ceil(nbytes / ranks_per_node)
    if operation == ALL_REDUCE:
        parts = [
            within(REDUCE_SCATTER, nbytes, ranks_per_node, inner),
            ring(ALL_REDUCE, share, nodes, outer),
            within(ALL_GATHER, nbytes, ranks_per_node, inner),
        ]
    elif operation == BROADCAST:
        parts = [ring(BROADCAST, nbytes, nodes, outer), within(BROADCAST, nbytes, ranks_per_node, inner)]
    else:
        parts = [within(operation, nbytes, ranks_per_node, inner), ring(operation, share, nodes, outer)]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    total = Cost(sum(part.latency_s for part in known), sum(part.bandwidth_s for part in known), "")
    return replace(total, method=f"hierarchical {known[0].method}")


def _halves(operation: str) -> int:
    """An all-reduce is a reduce-scatter and an all-gather."""
    return 2 if operation == ALL_REDUCE else 1


def _levels(ranks: int) -> int:
    return (ranks - 1).bit_length()
