"""What collectives cost: formulas at values worked out by hand, NCCL's own model, and the choice between ways."""

from __future__ import annotations

import pytest

from tp.errors import RequestError
from tp.planning.collectives import (
    ALGORITHMS,
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    REDUCE_SCATTER,
    Line,
    Link,
    hierarchical,
    one_shot,
    recursive_halving,
    ring,
    tree,
    two_shot,
)
from tp.planning.hardware import Fabric, MeasuredCollective
from tp.planning.nccl import NcclTopology, nccl

LINK = Link(latency_s=1.0, bytes_per_s=10.0)
HOPPER = NcclTopology("hopper", "nvlink", 24, 15.0, 388.0, 0.0, 8, 40.0)


@pytest.mark.parametrize(
    "algorithm, ranks, latency, bandwidth",
    [
        (ring, 4, 6, 2 * 3 / 4 * 12),
        (tree, 4, 4, 2 * 12),
        (tree, 5, 6, 2 * 12),  # a third level for one more rank
        (recursive_halving, 4, 4, 2 * 3 / 4 * 12),
        (recursive_halving, 5, 4 + 2, 2 * 3 / 4 * 12 + 2 * 12),  # the fifth hands over, and gets back
        (one_shot, 4, 1, 3 * 12),
        (two_shot, 4, 2, 2 * 3 / 4 * 12),
    ],
)
def test_an_all_reduce_of_120_bytes(algorithm, ranks, latency, bandwidth):
    cost = algorithm(ALL_REDUCE, 120, ranks, LINK)
    assert (cost.latency_s, cost.bandwidth_s) == pytest.approx((latency, bandwidth))


@pytest.mark.parametrize("algorithm", [ring, recursive_halving])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(algorithm, ranks):
    parts = [algorithm(operation, 960, ranks, LINK) for operation in (REDUCE_SCATTER, ALL_GATHER)]
    if ranks == 3 and algorithm is recursive_halving:
        return  # the extra rank hands over once, not twice
    assert sum(part.seconds for part in parts) == pytest.approx(algorithm(ALL_REDUCE, 960, ranks, LINK).seconds)


def test_one_shot_wins_small_and_two_shot_large():
    small, large = (
        [algorithm(ALL_REDUCE, nbytes, 8, LINK).seconds for algorithm in (one_shot, two_shot)] for nbytes in (1, 1000)
    )
    assert small[0] < small[1] and large[0] > large[1]
    between_two = [algorithm(ALL_REDUCE, 1000, 2, LINK).bandwidth_s for algorithm in (one_shot, two_shot)]
    assert between_two[0] == between_two[1], "two ranks read as much either way"


def test_what_an_algorithm_has_not():
    assert tree(ALL_GATHER, 1, 4, LINK) is None
    assert two_shot(REDUCE_SCATTER, 1, 4, LINK) is None
    assert recursive_halving(BROADCAST, 1, 4, LINK) is None


def test_a_hierarchy_sends_a_share_over_the_network():
    """Two nodes of four: 120 bytes in the nodes, 30 between them, once around a ring of two."""
    cost = hierarchical(ALL_REDUCE, 120, 2, 4, ring, LINK, Link(100.0, 1.0))
    inner = 2 * 3 / 4 * 12
    assert (cost.latency_s, cost.bandwidth_s) == pytest.approx((2 * 3 + 2 * 100, inner + 30))
    assert hierarchical(ALL_REDUCE, 120, 2, 4, two_shot, LINK, LINK) is None


def test_nccl_at_eight_hoppers_is_what_its_constants_say():
    small = nccl(ALL_REDUCE, 8192, 8, 1, HOPPER)
    assert small.method == "NCCL ring LL"
    assert small.latency_s == pytest.approx(6.6e-6 + 14 * 0.6e-6)
    assert small.bandwidth_s == pytest.approx(8192 / (141e9 * 8 / 14))
    large = nccl(ALL_REDUCE, 2**27, 8, 1, HOPPER)
    assert large.method == "NCCL NVLS" and large.latency_s == pytest.approx(25e-6)
    assert large.bandwidth_s == pytest.approx(2**27 / (8 * 40e9 * 2 * 0.85 * 7 / 8 * 8 / 14))
    gather = nccl(ALL_GATHER, 2**27, 8, 1, HOPPER)
    assert gather.method == "NCCL ring Simple"
    assert gather.seconds == pytest.approx(8.4e-6 + 7 * 3.4e-6 + 2**27 / (360e9 * 8 / 7))


def test_nccl_across_nodes_pays_the_network():
    one, two, four = (nccl(ALL_REDUCE, 16384, 8 * nodes, nodes, HOPPER).seconds for nodes in (1, 2, 4))
    assert one < two < four
    tree_of_four = 6.8e-6 + 2 * (7 * 0.6e-6 + 2 * 5e-6)
    cost = nccl(ALL_REDUCE, 16384, 32, 4, HOPPER)
    assert cost.method == "NCCL tree LL" and cost.latency_s == pytest.approx(tree_of_four)


def test_pci_has_no_ll128():
    pci = NcclTopology("ampere", "pci", 2, 11.0)
    methods = {nccl(ALL_REDUCE, 4**power, 4, 1, pci).method for power in range(5, 14)}
    assert methods <= {"NCCL ring LL", "NCCL ring Simple", "NCCL tree LL", "NCCL tree Simple"}


def test_a_fabric_takes_the_cheapest_way_that_serves():
    line = Line(2e-5, 0.0, 1e-12)
    fabric = Fabric(
        algorithms=("one_shot", "two_shot"),
        operations=(ALL_REDUCE,),
        most_bytes=2**20,
        link=Link(4e-6, 300e9),
        nccl=HOPPER,
        measured=(MeasuredCollective(ALL_REDUCE, 8, "fitted", line),),
    )
    assert fabric.cost(ALL_REDUCE, 8192, 8, 1).method == "one shot"
    assert fabric.cost(ALL_REDUCE, 2**20, 8, 1).method == "two shot"
    assert fabric.cost(ALL_REDUCE, 2**24, 8, 1) == line.cost(2**24, "fitted")
    assert fabric.cost(ALL_REDUCE, 2**24, 4, 1).method.startswith("NCCL")
    assert fabric.cost(ALL_GATHER, 8192, 8, 1).method.startswith("NCCL")
    assert fabric.cost(ALL_REDUCE, 8192, 1, 1).seconds == 0


def test_a_fabric_says_what_it_does_not_know():
    lone = Fabric(measured=(MeasuredCollective(ALL_REDUCE, 2, "measured", Line(1e-5, 0, 0)),))
    with pytest.raises(RequestError, match="does not say what all_reduce of 4 ranks on 1 node costs"):
        lone.cost(ALL_REDUCE, 8, 4, 1)
    pair = Fabric(algorithms=("ring",), link=LINK)
    with pytest.raises(RequestError, match="all_gather of 4 ranks on 2 nodes"):
        pair.cost(ALL_GATHER, 8, 4, 2)
    joined = Fabric(algorithms=tuple(ALGORITHMS), link=LINK, network=Link(5.0, 1.0))
    assert joined.cost(ALL_REDUCE, 80, 4, 2).method.startswith("hierarchical")
