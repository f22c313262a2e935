"""What delay and loss on the link cost: collectives and decode steps, beside what the planner says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.multi_node_parts.agreement import generate_options, report_of
from benchmarks.multi_node_parts.collective_cases import (
    CASES,
    TRIPS_A_STEP,
    added_s,
    added_to_step_s,
    decode_collectives,
    slope,
)
from benchmarks.multi_node_parts.launching import RANKS_A_NODE, run
from benchmarks.multi_node_parts.networks import Network
from launch.measurement.spread import Spread
from tp.config import ModelConfig

MEASURING = "benchmarks.multi_node_parts.time_collectives"


@dataclass(frozen=True)
class CollectiveTimes:
    """What collectives took over one state of the link.

    Attributes:
        delay_s, loss: of the link, each way.
        seconds: of a call on rank 0, by the name of its case.
        communicator: the class that had them.
        hosts: the ranks' host names.
    """

    delay_s: float
    loss: float
    seconds: dict[str, Spread]
    communicator: str
    hosts: list[str]


@dataclass(frozen=True)
class DecodeTimes:
    """What decode steps took over one state of the link.

    Attributes:
        delay_s, loss: of the link, each way.
        seconds: of a step: the mean between two tokens of each generation.
        communication_share: of a generation's time, spent in collectives on rank 0; the largest of all.
    """

    delay_s: float
    loss: float
    seconds: Spread
    communication_share: float


def collective_times(
    network: Network, delay_s: float, loss: float, directory: Path, *, repeats: int
) -> CollectiveTimes:
    """Times `repeats` calls of each collective over a link with that delay and loss."""
    network.set(delay_s, loss)
    target = directory / "collectives.json"
    run(network, ["run", "--nproc", str(RANKS_A_NODE), "-m", MEASURING, str(target), str(repeats)], directory)
    network.set(0.0, 0.0)
    measured = json.loads(target.read_text())
    spreads = {name: Spread.of(seconds) for name, seconds in measured["seconds"].items()}
    return CollectiveTimes(delay_s, loss, spreads, measured["communicator"], measured["hosts"])


def decode_times(
    network: Network, delay_s: float, loss: float, directory: Path, *, model: str, runs: int
) -> DecodeTimes:
    """Times the steps of `runs` generations, each by ranks of its own, over a link with that delay and loss."""
    network.set(delay_s, loss)
    reports = [report_of(run(network, ["generate", *generate_options(model)], directory)) for _ in range(runs)]
    network.set(0.0, 0.0)
    seconds = Spread.of(report["timings"]["tpot_ms"] / 1e3 for report in reports)
    return DecodeTimes(delay_s, loss, seconds, max(map(_communication_share, reports)))


@dataclass(frozen=True)
class Growth:
    """How what is named grows with the link's delay, in delays: seconds for each second.

    Attributes:
        steps: of the algorithm, or of all algorithms of a decode step.
        predicted, measured: the planner's, and the slope of the medians.
    """

    name: str
    steps: float
    predicted: float
    measured: float


def collective_growths(times: Sequence[CollectiveTimes]) -> list[Growth]:
    """Of every collective, over links that lose nothing."""
    delays = [each.delay_s for each in times]
    found = []
    for case in CASES:
        medians = [each.seconds[case.name].median for each in times]
        found.append(_growth(case.name, added_s(case.operation, case.nbytes, 1.0), slope(delays, medians)))
    return found


def decode_growth(times: Sequence[DecodeTimes], model: Path) -> Growth:
    """Of a decode step of the model, over links that lose nothing."""
    config = ModelConfig.from_hf(json.loads((model / "config.json").read_text(encoding="utf-8")))
    collectives = decode_collectives(config)
    measured = slope([each.delay_s for each in times], [each.seconds.median for each in times])
    name = f"decode step, {sum(each.count for each in collectives)} collectives"
    return _growth(name, added_to_step_s(collectives, 1.0), measured)


def _growth(name: str, predicted: float, measured: float) -> Growth:
    return Growth(name, predicted / TRIPS_A_STEP, predicted, measured)


def _communication_share(report: dict[str, Any]) -> float:
    timings = report["timings"]
    tokens = len(report["sequences"][0]["new_ids"])
    whole = (timings["ttft_ms"] + timings["tpot_ms"] * (tokens - 1)) / 1e3
    return float(report["communication"]["seconds"] / whole)
