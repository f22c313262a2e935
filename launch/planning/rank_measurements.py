"""`python -m launch.planning.rank_measurements`: on every rank, what collectives take and what a process weighs.

Rank 0 is ready, see `launch.measurement.serving`, with the facts {"collectives": {operation: {bytes: seconds}},
"runtime_bytes": int}. Times are medians of single calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from launch.default_model import EMBEDDED
from launch.measurement.interleaving import interleave
from launch.measurement.serving import Line
from launch.measurement.spread import Spread
from launch.report import peak_rss_bytes
from tp.parallel import TensorParallelGroup
from tp.parallel.communicator import Communicator
from tp.parallel.partition import chunk_ranges
from tp.planning.collectives import ALL_GATHER, OPERATIONS, REDUCE_SCATTER

SIZES = tuple(4**power for power in range(5, 12))
"""1 KiB to 4 MiB, of the whole message."""
ROUNDS = 5


def collective(communicator: Communicator, operation: str, nbytes: int) -> Callable[[], Tensor]:
    """One collective over a message of so many bytes of bfloat16 in all."""
    elements = nbytes // 2
    rows = [len(chunk) for chunk in chunk_ranges(elements, communicator.size)]
    whole = torch.ones(elements, dtype=torch.bfloat16)
    if operation == ALL_GATHER:
        return partial(communicator.all_gather, whole[: rows[communicator.rank]], rows)
    if operation == REDUCE_SCATTER:
        return partial(communicator.reduce_scatter, whole, rows)
    return partial(getattr(communicator, operation), whole)


def median_seconds(call: Callable[[], Tensor], repeats: int) -> float:
    """Of single calls, one after the other; as many on every rank."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return Spread.of(seconds).median


def collective_times(communicator: Communicator) -> dict[str, dict[int, float]]:
    """Seconds by operation and bytes, all of them in turns."""
    actions = {
        (operation, nbytes): partial(
            median_seconds, collective(communicator, operation, nbytes), max(5, min(100, (1 << 22) // nbytes))
        )
        for operation in OPERATIONS
        for nbytes in SIZES
    }
    names = {f"{operation} {nbytes}": (operation, nbytes) for operation, nbytes in actions}
    rounds = interleave({name: actions[key] for name, key in names.items()}, rounds=ROUNDS)
    times: dict[str, dict[int, float]] = {operation: {} for operation in OPERATIONS}
    for name, (operation, nbytes) in names.items():
        times[operation][nbytes] = Spread.of(rounds.results[name]).median
    return times


def runtime_bytes(group: TensorParallelGroup) -> int:
    """The most that this process has had resident after a small generation, without what the model itself takes."""
    import tp
    from tp.checkpoint import weight_bytes
    from tp.generation import GenerationOptions

    model = tp.load(str(EMBEDDED), group)
    stream = model.generate_stream(
        ["In the beginning"] if group.rank == 0 else None, GenerationOptions(max_new_tokens=8)
    )
    for _ in stream:
        pass
    return peak_rss_bytes() - weight_bytes(model) - stream.result().kv_bytes


def main() -> None:
    """Measures on this rank."""
    line = Line()
    group = TensorParallelGroup.from_environment(device="cpu")
    runtime = max(group.communicator.all_gather_object(runtime_bytes(group)))
    times = collective_times(group.communicator) if group.size > 1 else {}
    if group.rank == 0:
        line.ready(collectives=times, runtime_bytes=runtime)
    group.close()


if __name__ == "__main__":
    main()
