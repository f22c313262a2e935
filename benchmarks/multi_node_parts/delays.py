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
class LinkTimes:
    """What was measured over one state of the link.

    Attributes:
        collectives: seconds of a call on rank 0, by the name of its case.
        decode_s: a decode step: the mean time between tokens, of several runs.
        communication_share: of a generation's time, spent in collectives on rank 0.
    """

    delay_s: float
    loss: float
    collectives: dict[str, Spread]
    decode_s: Spread
    communication_share: float
    communicator: str
    hosts: list[str]


def link_times(
    network: Network, delay_s: float, loss: float, directory: Path, *, model: str, repeats: int, runs: int
) -> LinkTimes:
    """Times collectives and decode steps over a link with that delay and loss.

    Args:
        repeats: calls of each collective.
        runs: generations, each by ranks of its own.
    """
    network.set(delay_s, loss)
    target = directory / "collectives.json"
    ranks = ["--nproc", str(RANKS_A_NODE), "-m", MEASURING, str(target), str(repeats)]
    run(network, ["run", *ranks], directory)
    measured = json.loads(target.read_text())
    reports = [report_of(run(network, ["generate", *generate_options(model)], directory)) for _ in range(runs)]
    network.set(0.0, 0.0)
    return LinkTimes(
        delay_s,
        loss,
        {name: Spread.of(seconds) for name, seconds in measured["seconds"].items()},
        Spread.of(report["timings"]["tpot_ms"] / 1e3 for report in reports),
        max(map(_communication_share, reports)),
        measured["communicator"],
        measured["hosts"],
    )


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


def growths(times: Sequence[LinkTimes], model: Path) -> list[Growth]:
    """Of every collective and of a decode step of the model, from times over links that lose nothing."""
    config = ModelConfig.from_hf(json.loads((model / "config.json").read_text(encoding="utf-8")))
    delays = [each.delay_s for each in times]
    found = []
    for case in CASES:
        medians = [each.collectives[case.name].median for each in times]
        found.append(_growth(case.name, added_s(case.operation, case.nbytes, 1.0), slope(delays, medians)))
    steps = decode_collectives(config)
    name = f"decode step, {sum(each.count for each in steps)} collectives"
    measured = slope(delays, [each.decode_s.median for each in times])
    return [*found, _growth(name, added_to_step_s(steps, 1.0), measured)]


def _growth(name: str, predicted: float, measured: float) -> Growth:
    return Growth(name, predicted / TRIPS_A_STEP, predicted, measured)


def _communication_share(report: dict[str, Any]) -> float:
    timings = report["timings"]
    tokens = len(report["sequences"][0]["new_ids"])
    whole = (timings["ttft_ms"] + timings["tpot_ms"] * (tokens - 1)) / 1e3
    return float(report["communication"]["seconds"] / whole)
