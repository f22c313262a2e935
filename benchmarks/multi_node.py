"""Runs over two nodes, on one machine: the results of one node, what the link costs, and how a run ends.

    sudo python -m benchmarks.multi_node [--network KIND] [--parts agreement,delays,window,loss,ends] [--json FILE]

Two ranks on each of two nodes, started by two launchers that meet over the link. See docs/multi-node.md for what a node
is here, and for what was measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.multi_node_parts.agreement import agreement
from benchmarks.multi_node_parts.delays import (
    CollectiveTimes,
    DecodeTimes,
    collective_growths,
    collective_times,
    decode_growth,
    decode_times,
)
from benchmarks.multi_node_parts.ends import ends
from benchmarks.multi_node_parts.launching import ROOT
from benchmarks.multi_node_parts.networks import KINDS, LOOPBACK, OWN_WINDOW, Network, network
from benchmarks.multi_node_parts.tables import print_results
from launch.arguments import output_file, positive
from launch.measurement.command_line import names, reporting_errors, tell
from tp.errors import NumericalError

MODEL = ROOT / "launch" / "embedded_model"
WIDE_WINDOW = 400
"""Segments, 579 KB: more than any collective here sends to a rank."""
Part = Callable[[Network, argparse.Namespace, Path], Any]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--network", choices=["auto", *KINDS], default="auto", help="default: the best that is allowed")
    made.add_argument("--parts", type=names, default=list(PARTS), metavar="P,...", help="default: all")
    made.add_argument(
        "--delays", type=milliseconds, default=milliseconds("0,2,5,10"), metavar="MS,...", help="each way"
    )
    made.add_argument("--loss", type=float, default=0.01, help="share of packets that the part loss loses (0.01)")
    made.add_argument("--repeats", type=positive, default=40, help="calls of each collective (40)")
    made.add_argument("--runs", type=positive, default=3, help="generations over each link (3)")
    made.add_argument("--model", default=str(MODEL), help="a directory; at least 4 query heads (the embedded model)")
    made.add_argument("--json", type=output_file, metavar="FILE", help="where all results go")
    return made


def milliseconds(text: str) -> list[float]:
    """Numbers between commas, as seconds."""
    return [float(part) / 1e3 for part in text.split(",")]


def main() -> None:
    arguments = parser().parse_args()
    with network(arguments.network) as joined, tempfile.TemporaryDirectory(prefix="tp-multi-node-") as directory:
        tell(f"{joined.kind}: {KINDS[joined.kind]}")
        results: dict[str, Any] = {"network": joined.kind, "about": KINDS[joined.kind]}
        for part in arguments.parts:
            if joined.kind == LOOPBACK and part in NEED_A_LINK:
                tell(f"{part}: not over loopback")
                continue
            tell(part)
            results[part] = PARTS[part](joined, arguments, Path(directory))
    print_results(results)
    if arguments.json:
        arguments.json.write_text(json.dumps({**_circumstances(arguments), **results}, indent=1) + "\n")
    if not results.get("agreement", {"holds": True})["holds"]:
        raise NumericalError("two nodes do not give the results of one machine")


def _agreement(joined: Network, arguments: argparse.Namespace, directory: Path) -> Any:
    found = agreement(joined, arguments.model, directory)
    return {**asdict(found), "holds": found.holds}


def _delays(joined: Network, arguments: argparse.Namespace, directory: Path) -> Any:
    links = [(delay_s, 0.0) for delay_s in arguments.delays]
    collectives, decode = _over(joined, arguments, directory, links)
    growths = [*collective_growths(collectives), decode_growth(decode, Path(arguments.model))]
    return {**_as_fields(collectives, decode), "growths": list(map(asdict, growths))}


def _window(joined: Network, arguments: argparse.Namespace, directory: Path) -> Any:
    """Collectives alone: the messages of a decode step fit into the window anyway."""
    joined.open_window(WIDE_WINDOW)
    times = [
        collective_times(joined, delay_s, 0.0, directory, repeats=arguments.repeats) for delay_s in arguments.delays
    ]
    joined.open_window(OWN_WINDOW)
    growths = list(map(asdict, collective_growths(times)))
    return {"segments": WIDE_WINDOW, "collectives": list(map(asdict, times)), "growths": growths}


def _loss(joined: Network, arguments: argparse.Namespace, directory: Path) -> Any:
    delay_s = min(filter(None, arguments.delays), default=0.0)
    return _as_fields(*_over(joined, arguments, directory, [(delay_s, 0.0), (delay_s, arguments.loss)]))


def _ends(joined: Network, arguments: argparse.Namespace, directory: Path) -> Any:
    del arguments, directory
    return list(map(asdict, ends(joined, with_cut=joined.kind != LOOPBACK)))


PARTS: Mapping[str, Part] = {
    "agreement": _agreement, "delays": _delays, "window": _window, "loss": _loss, "ends": _ends,
}  # fmt: skip
NEED_A_LINK = ("delays", "window", "loss")


def _over(
    joined: Network, arguments: argparse.Namespace, directory: Path, links: Sequence[tuple[float, float]]
) -> tuple[list[CollectiveTimes], list[DecodeTimes]]:
    """Times over each of the links, which are given as delay and loss."""
    collectives, decode = [], []
    for delay_s, loss in links:
        tell(f"  {1e3 * delay_s:g} ms each way, {100 * loss:g} % lost")
        collectives.append(collective_times(joined, delay_s, loss, directory, repeats=arguments.repeats))
        decode.append(decode_times(joined, delay_s, loss, directory, model=arguments.model, runs=arguments.runs))
    return collectives, decode


def _as_fields(collectives: Sequence[CollectiveTimes], decode: Sequence[DecodeTimes]) -> dict[str, Any]:
    return {"collectives": list(map(asdict, collectives)), "decode": list(map(asdict, decode))}


def _circumstances(arguments: argparse.Namespace) -> dict[str, Any]:
    from launch.info import gather

    machine = gather()
    return {
        "date": datetime.date.today().isoformat(),
        "model": Path(arguments.model).name,
        "repeats": arguments.repeats,
        "runs": arguments.runs,
        "machine": {name: machine[name] for name in ("cpu", "cores", "platform")},
        "packages": {"torch": machine["packages"]["torch"]},
    }


if __name__ == "__main__":
    sys.exit(reporting_errors(main))
