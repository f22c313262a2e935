"""What NCCL expects its collectives to cost: the model that it chooses algorithms and protocols with.

The constants and formulas are those of NCCL 2.28.7, `src/graph/tuning.cc` (`ncclTunerConstantsDefaults`,
`nvlsEfficiency`, `treeCorrectionFactor`, `ncclTopoTuneModel`, `ncclTopoGetAlgoTime`), for rings, trees and NVLS, the
reductions that NVSwitches make. Latencies there are in microseconds, bandwidths in GB/s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tp.planning.collectives import ALL_REDUCE, BROADCAST, Cost

PROTOCOLS = ("LL", "LL128", "Simple")
"""8 bytes of flag for 8 of data; 8 for 120, on NVLink; none, but a hand-shake for each chunk."""
BASE_LATENCIES = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
LATENCIES: Mapping[str, Mapping[str, tuple[float, float, float]]] = {
    "nvlink": {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)},
    "pci": {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7)},
    "network": {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)},
}
"""Of a step over each kind of link, by protocol."""
NVLS_LATENCIES = {"nvlink": 25.0, "network": 18.0}
NVLS_TREE_NETWORK_LATENCY = 20.9
NETWORK_OVERHEAD = 1.0
"""Of each step of a ring that crosses nodes, three times as much in Simple."""
PLATEAU_BYTES = 64
"""From so many bytes a channel and rank on, a ring across nodes takes `Generation.plateau` times its latency."""


@dataclass(frozen=True)
class Generation:
    """What NCCL knows of a generation of GPUs; triples are for one, two and more nodes.

    Attributes:
        ll: most GB/s of LL. ring_ll128, tree_ll128, tree, nvls_tree: most GB/s of a channel.
        plateau: of a Simple ring's all-reduce across nodes.
        nvls_efficiency: share of the links that NVLS reaches; 0 without.
    """

    ll: tuple[float, float, float]
    ring_ll128: tuple[float, float, float]
    tree_ll128: tuple[float, float, float]
    tree: tuple[float, float, float]
    nvls_tree: tuple[float, float, float]
    plateau: float = 1.4
    nvls_efficiency: float = 0.0


GENERATIONS: Mapping[str, Generation] = {
    "volta": Generation(
        ll=(39.0, 39.0, 20.4),
        ring_ll128=(20.0, 20.0, 20.0),
        tree_ll128=(20.0, 20.0, 20.0),
        tree=(26.5, 18.5, 10.0),
        nvls_tree=(26.5, 18.5, 10.0),
        plateau=1.9,
    ),
    "ampere": Generation(
        ll=(87.7, 22.5, 19.0),
        ring_ll128=(20.0, 20.0, 20.0),
        tree_ll128=(20.0, 20.0, 20.0),
        tree=(24.0, 23.6, 17.8),
        nvls_tree=(24.0, 23.6, 17.8),
    ),
    "hopper": Generation(
        ll=(141.0, 45.0, 35.0),
        ring_ll128=(36.7, 36.7, 36.7),
        tree_ll128=(36.7, 36.7, 29.0),
        tree=(38.7, 41.4, 36.0),
        nvls_tree=(0.0, 57.7, 45.5),
        nvls_efficiency=0.85,
    ),
    "blackwell": Generation(
        ll=(282.0, 90.0, 70.0),
        ring_ll128=(40.0, 40.0, 40.0),
        tree_ll128=(55.6, 31.67, 20.0),
        tree=(70.0, 42.8, 24.0),
        nvls_tree=(0.0, 96.0, 80.0),
        nvls_efficiency=0.74,
    ),
}
TREE_CORRECTIONS: Mapping[str, tuple[float, ...]] = {
    "LL": (1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    "LL128": (
        1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9,
    ),
    "Simple": (
        0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9,
        0.9,
    ),
}  # fmt: skip
"""Of a tree's bandwidth, by powers of two from 64 bytes; 1 above."""


@dataclass(frozen=True)
class NcclTopology:
    """What NCCL finds when it looks for its channels.

    Attributes:
        generation: a key of `GENERATIONS`.
        link: "nvlink" or "pci".
        channels: rings or trees that run at once.
        channel_gb_per_s: of each, within a node.
        network_gb_per_s: of a node's network cards together, in each direction; None for a lone node.
        network_latency_us: what the network adds to NCCL's own latency of a step.
        nvls_channels, nvls_channel_gb_per_s: those of NVLS; 0 without NVSwitches that reduce.
    """

    generation: str
    link: str
    channels: int
    channel_gb_per_s: float
    network_gb_per_s: float | None = None
    network_latency_us: float = 0.0
    nvls_channels: int = 0
    nvls_channel_gb_per_s: float = 0.0


def nccl(operation: str, nbytes: int, ranks: int, nodes: int, topology: NcclTopology) -> Cost:
    """What NCCL takes to be the cheapest way.

    Args:
        ranks: of all nodes, dealt out evenly.
        nodes: more than one only with a network.
    """
    return min(_costs(operation, nbytes, ranks, nodes, topology), key=lambda cost: cost.seconds)


def _costs(operation: str, nbytes: int, ranks: int, nodes: int, topology: NcclTopology) -> Iterator[Cost]:
    for index, protocol in enumerate(PROTOCOLS):
        if protocol == "LL128" and topology.link != "nvlink":
            continue
        yield _ring(operation, nbytes, ranks, nodes, topology, index)
        if operation == ALL_REDUCE:
            yield _tree(nbytes, ranks, nodes, topology, index)
    if operation == ALL_REDUCE and topology.nvls_channels >= 2:
        yield _nvls(nbytes, ranks, nodes, topology)


def _ring(operation: str, nbytes: int, ranks: int, nodes: int, topology: NcclTopology, index: int) -> Cost:
    generation, protocol = GENERATIONS[topology.generation], PROTOCOLS[index]
    bus = _bus_gb_per_s(topology, nodes)
    if protocol == "LL":
        bus = min(generation.ll[_scale(nodes)], bus / 2)
    elif protocol == "LL128":
        bus = min(0.92 * bus, topology.channels * generation.ring_ll128[_scale(nodes)])
    steps = {ALL_REDUCE: 2 * (ranks - 1), BROADCAST: ranks}.get(operation, ranks - 1)
    crossing = (nodes - 1) * (2 if operation == ALL_REDUCE else 1)
    inner, outer = LATENCIES[topology.link]["ring"][index], _network_latency("ring", topology, index)
    if nodes > 1:
        inner = max(inner, NETWORK_OVERHEAD * (3 if protocol == "Simple" else 1))
    latency = BASE_LATENCIES["ring"][index] + (steps - crossing) * inner + crossing * outer
    fills = nbytes >= PLATEAU_BYTES * topology.channels * ranks
    if nodes > 1 and protocol == "Simple" and operation == ALL_REDUCE and fills:
        latency *= generation.plateau
    return _cost(latency, nbytes, bus * ranks / steps, f"ring {protocol}")


def _tree(nbytes: int, ranks: int, nodes: int, topology: NcclTopology, index: int) -> Cost:
    generation, protocol = GENERATIONS[topology.generation], PROTOCOLS[index]
    bus = min(0.92 * _bus_gb_per_s(topology, nodes), topology.channels * generation.tree[_scale(nodes)])
    if protocol == "LL":
        bus = min(bus / 3.8, generation.ll[_scale(nodes)])
    elif protocol == "LL128":
        share = 7 / 9 if nodes == 1 else 120 / 128
        bus = min(bus * share, topology.channels * generation.tree_ll128[_scale(nodes)])
    inner, outer = LATENCIES[topology.link]["tree"][index], _network_latency("tree", topology, index)
    levels = math.floor(math.log2(nodes))
    latency = BASE_LATENCIES["tree"][index] + 2 * ((ranks / nodes - 1) * inner + levels * outer)
    corrections, power = TREE_CORRECTIONS[protocol], max(0, (nbytes // 64).bit_length() - 1)
    correction = corrections[power] if power < len(corrections) else 1.0
    return _cost(latency, nbytes, bus * 0.5 * correction, f"tree {protocol}")


def _nvls(nbytes: int, ranks: int, nodes: int, topology: NcclTopology) -> Cost:
    """NVLS in one node; between nodes its tree."""
    generation, channels = GENERATIONS[topology.generation], topology.nvls_channels
    inner = 2 * topology.nvls_channel_gb_per_s * generation.nvls_efficiency * (channels - 1) / channels
    latency, bus, name = NVLS_LATENCIES["nvlink"], channels * inner, "NVLS"
    if nodes > 1:
        network = (topology.network_gb_per_s or 0.0) * (2 if nodes == 2 else 1)
        bus = min(bus, network, channels * generation.nvls_tree[_scale(nodes)])
        crossing = NVLS_TREE_NETWORK_LATENCY + 2 * topology.network_latency_us
        latency, name = latency + 2 * math.floor(math.log2(nodes)) * crossing, "NVLS tree"
    return _cost(latency, nbytes, bus * ranks / (2 * (ranks - 1)), name)


def _bus_gb_per_s(topology: NcclTopology, nodes: int) -> float:
    """Of all channels; between nodes no more than the network has, as NCCL's search for channels would find."""
    inner = topology.channels * topology.channel_gb_per_s
    if nodes == 1:
        return inner
    assert topology.network_gb_per_s is not None
    return min(inner, topology.network_gb_per_s)


def _network_latency(algorithm: str, topology: NcclTopology, index: int) -> float:
    """Of a step between nodes; Simple waits for its data to be flushed as well."""
    times = 2 if PROTOCOLS[index] == "Simple" else 1
    return LATENCIES["network"][algorithm][index] + times * topology.network_latency_us


def _scale(nodes: int) -> int:
    return min(nodes, 3) - 1


def _cost(latency_us: float, nbytes: int, gb_per_s: float, method: str) -> Cost:
    return Cost(latency_us / 1e6, nbytes / (gb_per_s * 1e9), f"NCCL {method}")
