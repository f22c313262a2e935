"""Machines, as data: what a rank computes, reads and holds, how ranks are joined, and where each number is from.

A profile is a JSON file in `profiles/`, or one that `launch plan --calibrate` has written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tp.errors import RequestError
from tp.json_objects import read_object, typed
from tp.planning.collectives import ALGORITHMS, OPERATIONS, Cost, Line, Link, hierarchical
from tp.planning.nccl import GENERATIONS, LATENCIES, NcclTopology, nccl

PROFILES = Path(__file__).with_name("profiles")
MOST_RANKS = 2**16
LEAST_RATE, LARGEST_NUMBER = 1e-3, 1e24
"""Of numbers in a profile; beyond them products and quotients would leave the range of floats."""
ANY_DEGREE = 0
"""Key of rates that hold at every degree."""


@dataclass(frozen=True)
class Rates:
    """How fast one rank is.

    Attributes:
        read_bytes_per_s: of weights.
        matrix_flops_per_s: by dtype, of products with so many rows of x: (rows, FLOP/s), rows ascending.
        attention_flops_per_s: of attention to more than one token.
        stream_bytes_per_s: read and written by what is no product: norms, rotary, activations.
        sampler_bytes_per_s: of logits that tokens are chosen from; None: as `stream_bytes_per_s`.
        cache_bytes_per_s: of keys and values; None: as `read_bytes_per_s`.
        captured_layer_s, eager_layer_s: of each layer of a decode step that was captured, and of any other step.
        captured_step_s, eager_step_s: of each such step.
        captured_collective_s: latency of a collective in a captured step, where it is another than outside.
    """

    read_bytes_per_s: float
    matrix_flops_per_s: Mapping[str, Sequence[tuple[int, float]]]
    attention_flops_per_s: float
    stream_bytes_per_s: float
    captured_layer_s: float = 0.0
    eager_layer_s: float = 0.0
    captured_step_s: float = 0.0
    eager_step_s: float = 0.0
    captured_collective_s: float | None = None
    sampler_bytes_per_s: float | None = None
    cache_bytes_per_s: float | None = None

    def flops_per_s(self, dtype: str, rows: int) -> float:
        """Of a product with `rows` rows of x; between those that are given along a line in logarithms.

        Raises:
            RequestError: no rate for this dtype.
        """
        points = self.matrix_flops_per_s.get(dtype)
        if not points:
            known = ", ".join(self.matrix_flops_per_s)
            raise RequestError(f"the hardware profile has no matrix rate for dtype {dtype}: it has {known}")
        above = next((index for index, (at, _) in enumerate(points) if at >= rows), len(points))
        if above in (0, len(points)):
            return points[min(above, len(points) - 1)][1]
        (low, slow), (high, fast) = points[above - 1], points[above]
        share = math.log(rows / low) / math.log(high / low)
        return slow * math.exp(share * math.log(fast / slow))


@dataclass(frozen=True)
class MeasuredCollective:
    """A line through measured times, for a group of exactly so many ranks of one node."""

    operation: str
    ranks: int
    method: str
    line: Line


@dataclass(frozen=True)
class Fabric:
    """How ranks are joined. A collective takes the cheapest of the ways that there are.

    Attributes:
        algorithms: keys of `ALGORITHMS`, over `link`; between nodes they are the inner part of a hierarchy.
        operations, most_bytes: what they are for, and up to which size; None: whatever the size.
        link: between ranks of a node. network: between nodes, of each rank.
        nccl: what NCCL knows of the machine; None without NCCL.
        measured: in place of NCCL's own estimate where one fits.
    """

    algorithms: tuple[str, ...] = ()
    operations: tuple[str, ...] = OPERATIONS
    most_bytes: int | None = None
    link: Link | None = None
    network: Link | None = None
    nccl: NcclTopology | None = None
    measured: tuple[MeasuredCollective, ...] = ()

    def cost(self, operation: str, nbytes: int, ranks: int, nodes: int) -> Cost:
        """Of one collective of `ranks` ranks, dealt out evenly over `nodes` nodes.

        Raises:
            RequestError: nothing is known that could do it.
        """
        if ranks == 1:
            return Cost(0.0, 0.0, "none")
        costs = [*self._algorithms(operation, nbytes, ranks, nodes), *self._library(operation, nbytes, ranks, nodes)]
        if not costs:
            where = f"{ranks} ranks on {nodes} node{'s' if nodes > 1 else ''}"
            raise RequestError(f"the hardware profile does not say what {operation} of {where} costs")
        return min(costs, key=lambda cost: cost.seconds)

    def _algorithms(self, operation: str, nbytes: int, ranks: int, nodes: int) -> list[Cost]:
        too_large = self.most_bytes is not None and nbytes > self.most_bytes
        if self.link is None or operation not in self.operations or too_large or (nodes > 1 and self.network is None):
            return []
        costs = []
        for name in self.algorithms:
            algorithm = ALGORITHMS[name]
            if nodes == 1:
                costs.append(algorithm(operation, nbytes, ranks, self.link))
            else:
                assert self.network is not None
                inner = (algorithm, self.link, self.network)
                costs.append(hierarchical(operation, nbytes, nodes, ranks // nodes, *inner))
        return [cost for cost in costs if cost is not None]

    def _library(self, operation: str, nbytes: int, ranks: int, nodes: int) -> list[Cost]:
        for measured in self.measured:
            if nodes == 1 and (measured.operation, measured.ranks) == (operation, ranks):
                return [measured.line.cost(nbytes, measured.method)]
        if self.nccl is None or (nodes > 1 and self.nccl.network_gb_per_s is None):
            return []
        return [nccl(operation, nbytes, ranks, nodes, self.nccl)]


@dataclass(frozen=True)
class Profile:
    """A machine.

    Attributes:
        name: of the machine.
        device: "cuda" or "cpu".
        ranks_per_node: most ranks of a node.
        memory_bytes: of a rank; of a node that its ranks share, where `shares_memory`.
        runtime_bytes: what a rank's process, libraries and contexts take.
        rates: by degree, or under `ANY_DEGREE`.
        fabric: how the ranks are joined.
        sources: where the numbers are from, by what they are.
    """

    name: str
    device: str
    ranks_per_node: int
    memory_bytes: int
    shares_memory: bool
    runtime_bytes: int
    rates: Mapping[int, Rates]
    fabric: Fabric
    sources: Mapping[str, str] = field(default_factory=dict)

    def has_rates_of(self, tp_size: int) -> bool:
        """Whether it was measured at this degree, or holds at every one."""
        return tp_size in self.rates or ANY_DEGREE in self.rates

    def rates_of(self, tp_size: int) -> Rates:
        """Of a rank of a group of this degree.

        Raises:
            RequestError: the profile has rates for other degrees only.
        """
        rates = self.rates.get(tp_size) or self.rates.get(ANY_DEGREE)
        if rates is None:
            known = ", ".join(map(str, sorted(self.rates)))
            raise RequestError(f"--tp {tp_size}: profile {self.name} was measured at degrees {known} only")
        return rates

    def nodes_for(self, tp_size: int, most_nodes: int) -> int | None:
        """The fewest nodes that take so many ranks, as many each; None where there are not as many nodes."""
        return next(
            (n for n in range(1, most_nodes + 1) if tp_size % n == 0 and tp_size // n <= self.ranks_per_node), None
        )

    def memory_of_a_rank(self, tp_size: int, nodes: int) -> int:
        """Bytes that each rank may take."""
        return self.memory_bytes // (tp_size // nodes) if self.shares_memory else self.memory_bytes

    def to_json(self) -> str:
        """The content of a file that `load_profile` reads."""
        fields = asdict(self)
        fields["rates"] = {str(degree or "any"): rates for degree, rates in fields["rates"].items()}
        return json.dumps(fields, indent=1) + "\n"

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Profile:
        """From the content of a profile file.

        Raises:
            ValueError: it is something else, or has numbers that no machine has.
        """
        written = fields.get("rates")
        if not isinstance(written, Mapping):
            raise ValueError(f"rates are {written!r}: they must be an object")
        rates = {str(ANY_DEGREE) if degree == "any" else degree: given for degree, given in written.items()}
        profile = typed(cls, {**fields, "rates": rates}, "the profile")
        _check(profile)
        return profile


def profile_names() -> list[str]:
    """Of the profiles that come with the program."""
    return sorted(path.stem for path in PROFILES.glob("*.json"))


def load_profile(name: str) -> Profile:
    """A profile by its name, or from a file.

    Raises:
        RequestError: there is none of that name, or the file is not a profile.
    """
    path = PROFILES / f"{name.lower()}.json" if name.lower() in profile_names() else Path(os.path.expanduser(name))
    if not os.path.isfile(path):
        raise RequestError(f"there is no hardware profile or file {name}: choose from {', '.join(profile_names())}")
    try:
        return Profile.from_fields(read_object(path, RequestError))
    except ValueError as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{path} is not a hardware profile: {error}") from error


def _check(profile: Profile) -> None:
    """Refuses numbers that no machine has, and names that mean nothing.

    Raises:
        ValueError: see the messages.
    """
    _check_numbers(asdict(profile), "the profile")
    fabric, topology = profile.fabric, profile.fabric.nccl
    names: list[tuple[str, Sequence[str], Iterable[str]]] = [
        ("device", [profile.device], ("cuda", "cpu")),
        ("algorithm", fabric.algorithms, ALGORITHMS),
        ("operation", [*fabric.operations, *(measured.operation for measured in fabric.measured)], OPERATIONS),
        ("generation", [topology.generation] if topology else [], GENERATIONS),
        ("kind of link", [topology.link] if topology else [], [kind for kind in LATENCIES if kind != "network"]),
    ]
    for kind, found, known in names:
        if unknown := [name for name in found if name not in known]:
            raise ValueError(f"no {kind} {unknown[0]}: there are {', '.join(known)}")
    if not 1 <= profile.ranks_per_node <= MOST_RANKS:
        raise ValueError(f"ranks_per_node is {profile.ranks_per_node}: it must be in 1..{MOST_RANKS}")
    if topology:
        _check_nccl(topology)
    if not profile.rates:
        raise ValueError("it has no rates")
    for rates in profile.rates.values():
        if not rates.matrix_flops_per_s:
            raise ValueError("matrix_flops_per_s has no dtype")
        for dtype, points in rates.matrix_flops_per_s.items():
            rows = [at for at, _ in points]
            if not points or rows != sorted({*rows}) or rows[0] < 1 or min(rate for _, rate in points) < LEAST_RATE:
                raise ValueError(f"rates of {dtype} products are not (rows, FLOP/s) with rising rows from 1 on")


def _check_nccl(topology: NcclTopology) -> None:
    """Refuses channels that move nothing."""
    if topology.channels < 1:
        raise ValueError(f"channels are {topology.channels}: they must be at least 1")
    if not topology.nvls_channels:
        return
    if topology.nvls_channel_gb_per_s < LEAST_RATE:
        raise ValueError(f"nvls_channels are {topology.nvls_channels}, and nvls_channel_gb_per_s is 0")
    if not GENERATIONS[topology.generation].nvls_efficiency:
        raise ValueError(f"nvls_channels are {topology.nvls_channels}: generation {topology.generation} has no NVLS")


def _check_numbers(value: Any, name: str) -> None:
    """Every number is one that time can be made of; rates are not 0, but those of what a machine may lack."""
    if isinstance(value, dict):
        for inner, each in value.items():
            _check_numbers(each, str(inner))
    elif isinstance(value, (list, tuple)):
        for each in value:
            _check_numbers(each, name)
    elif isinstance(value, (int, float)):
        least = LEAST_RATE if name.endswith("_per_s") and not name.startswith("nvls") else 0.0
        if not least <= value <= LARGEST_NUMBER:
            raise ValueError(f"{name} is {value}: it must be in {least:g}..{LARGEST_NUMBER:g}")
