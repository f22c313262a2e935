"""All-reduces of eight Hopper GPUs: lines fitted without one size predict that size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.planner_parts.comparison import Comparison, read_data
from tp.planning.collectives import ALL_REDUCE, Line
from tp.planning.fitting import fit_line, fit_nonnegative
from tp.planning.hardware import load_profile
from tp.planning.nccl import nccl

WAYS = ("nccl", "multimem", "two_shot")
MEBIBYTE = 2**20
Fit = Callable[[Sequence[int], Sequence[float]], Line]


def measured(way: str) -> dict[int, float]:
    """Seconds by bytes, of all sizes."""
    table = read_data("all-reduce-hopper.json")[way]
    return {round(float(mebibytes) * MEBIBYTE): micro / 1e6 for mebibytes, micro in table.items()}


def fitted_sizes() -> list[int]:
    """Bytes of the sizes that lines are fitted to."""
    return [round(mebibytes * MEBIBYTE) for mebibytes in read_data("all-reduce-hopper.json")["fitted"]]


def plain_line(sizes: Sequence[int], seconds: Sequence[float]) -> Line:
    """Latency and bandwidth without a ramp, for comparison."""
    latency, per_byte = fit_nonnegative([[1.0, float(size)] for size in sizes], seconds)
    return Line(latency, 0.0, per_byte)


def leave_one_out(way: str, fit: Fit = fit_line) -> list[Comparison]:
    """Each size as a line through the others predicts it."""
    times = {size: seconds for size, seconds in measured(way).items() if size in fitted_sizes()}
    compared = []
    for size, seconds in times.items():
        others = {other: time for other, time in times.items() if other != size}
        line = fit(list(others), list(others.values()))
        compared.append(Comparison(_name(way, size), line.cost(size).seconds, seconds))
    return compared


def line_of(way: str) -> Line:
    """Through the five sizes."""
    times = measured(way)
    sizes = fitted_sizes()
    return fit_line(sizes, [times[size] for size in sizes])


def other_sizes(way: str) -> list[Comparison]:
    """The sizes of the table that no line is fitted to, as the line through the five predicts them."""
    line = line_of(way)
    return [
        Comparison(_name(way, size), line.cost(size).seconds, seconds)
        for size, seconds in measured(way).items()
        if size not in fitted_sizes()
    ]


def nccl_of_its_own_model() -> list[Comparison]:
    """NCCL's times as its own constants have them, nothing fitted."""
    topology = load_profile("H100").fabric.nccl
    assert topology is not None
    return [
        Comparison(_name("nccl", size), nccl(ALL_REDUCE, size, 8, 1, topology).seconds, seconds)
        for size, seconds in measured("nccl").items()
        if size in fitted_sizes()
    ]


def _name(way: str, size: int) -> str:
    return f"{way}, {size / MEBIBYTE:g} MiB"
