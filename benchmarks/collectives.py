"""Latency and bandwidth of collectives by size: the group's own communicator beside plain gloo, in turns.

    python -m launch run --nproc 2 benchmarks/collectives.py [--sizes 1024,16384] [--json FILE]

Times are rank 0's, of single calls, from entering to leaving. A size is that of the whole message: what all_reduce and
broadcast take, what reduce_scatter takes, what all_gather gives. Bandwidth is size by median time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from launch.arguments import output_file
from launch.measurement.command_line import TABLE_WIDTH, integers, tell
from launch.measurement.interleaving import Rounds, interleave
from launch.measurement.spread import Spread, paired_ratio
from tp.dtypes import DTYPES
from tp.errors import CommunicationError
from tp.parallel import TensorParallelGroup
from tp.parallel.communicator import Communicator, OrderedCommunicator
from tp.parallel.partition import chunk_ranges

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
SIZES = [4**power for power in range(5, 13)]
"""1 KiB to 16 MiB."""
OWN, GLOO = "own", "gloo"


def operation(communicator: Communicator, name: str, nbytes: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    """One collective over a message of `nbytes` in all."""
    elements = nbytes // dtype.itemsize
    rows = [len(chunk) for chunk in chunk_ranges(elements, communicator.size)]
    whole = torch.ones(elements, dtype=dtype)
    if name == "all_gather":
        return partial(communicator.all_gather, torch.ones(rows[communicator.rank], dtype=dtype), rows)
    if name == "reduce_scatter":
        return partial(communicator.reduce_scatter, whole, rows)
    return partial(getattr(communicator, name), whole)


def call_seconds(call: Callable[[], Tensor], repeats: int) -> list[float]:
    """The seconds of each of `repeats` calls, one after the other."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds


def repeats_of(nbytes: int) -> int:
    """Many calls of small messages, few of large ones; equal on all ranks."""
    return max(5, min(100, (1 << 23) // nbytes))


def measure(
    communicators: dict[str, Communicator], name: str, nbytes: int, dtype: torch.dtype, rounds: int
) -> Rounds[list[float]]:
    """Seconds of single calls of one collective, by communicator, a list for each round."""
    actions = {
        who: partial(call_seconds, operation(communicator, name, nbytes, dtype), repeats_of(nbytes))
        for who, communicator in communicators.items()
    }
    return interleave(actions, rounds=rounds)


def row(name: str, nbytes: int, rounds: Rounds[list[float]]) -> dict[str, Any]:
    """What is written of one collective and size; times in microseconds, bandwidth in GB/s."""
    of_calls = {who: [second for seconds in lists for second in seconds] for who, lists in rounds.results.items()}
    spreads = {who: Spread.of(1e6 * second for second in seconds) for who, seconds in of_calls.items()}
    medians = {who: [Spread.of(seconds).median for seconds in lists] for who, lists in rounds.results.items()}
    return {
        "operation": name,
        "bytes": nbytes,
        "microseconds": {who: asdict(spread) for who, spread in spreads.items()},
        "gb_per_s": {who: nbytes / spread.median / 1e3 for who, spread in spreads.items()},
        "own_speed": paired_ratio(medians[GLOO], medians[OWN]),
    }


def print_table(rows: list[dict[str, Any]], title: str) -> None:
    """On stdout, medians with quartiles."""
    from rich.box import ROUNDED
    from rich.console import Console
    from rich.table import Table

    table = Table(box=ROUNDED, title=title, title_justify="left")
    table.add_column("")
    for heading in ("bytes", "own µs", "gloo µs", "own GB/s", "gloo GB/s", "own is"):
        table.add_column(heading, justify="right")
    for found in rows:
        times = [found["microseconds"][who] for who in (OWN, GLOO)]
        table.add_row(
            found["operation"],
            f"{found['bytes']:,}",
            *(f"{t['median']:,.1f} ({t['lower_quartile']:,.1f} to {t['upper_quartile']:,.1f})" for t in times),
            *(f"{found['gb_per_s'][who]:.2f}" for who in (OWN, GLOO)),
            f"{found['own_speed']:.1f}x",
        )
    Console(highlight=False, width=None if sys.stdout.isatty() else TABLE_WIDTH).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=integers, default=SIZES, help="bytes (default 1 KiB to 16 MiB)")
    parser.add_argument("--operations", default=",".join(OPERATIONS), help="default: all four")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--runs", type=int, default=5, help="rounds that count (default 5)")
    parser.add_argument("--json", type=output_file, help="append the rows to this file, one a line")
    arguments = parser.parse_args()
    group = TensorParallelGroup.from_environment(device="cpu")
    if group.process_group is None:
        raise CommunicationError("there is one rank: start with python -m launch run --nproc 2 ...")
    communicators = {OWN: group.communicator, GLOO: OrderedCommunicator(group.process_group)}
    about = {"ranks": group.size, "dtype": arguments.dtype, "own": type(group.communicator).__name__}
    rows = []
    for name in arguments.operations.split(","):
        for nbytes in arguments.sizes:
            measured = measure(communicators, name, nbytes, DTYPES[arguments.dtype], arguments.runs)
            rows.append({**about, **row(name, nbytes, measured)})
            if group.rank == 0:
                tell(f"{name}, {nbytes:,} bytes")
    if group.rank == 0:
        print_table(rows, f"{group.size} ranks, {arguments.dtype}, own: {about['own']}")
        if arguments.json:
            with arguments.json.open("a") as out:
                out.writelines(json.dumps(found) + "\n" for found in rows)
    group.close()


if __name__ == "__main__":
    main()
