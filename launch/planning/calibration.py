"""`plan --calibrate`: this machine's CPUs as a hardware profile.

Four small models are timed at every degree, in turns, by what measures everything else here; the rates of a rank are
those that explain the times. Collectives are timed by size, through the ranks' own communicator.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

from launch.output_files import write
from launch.planning.machine import (
    ROUNDS,
    SYNTHETIC,
    Measurements,
    Subject,
    measure_models,
    measure_ranks,
)
from launch.planning.synthetic import CONFIGS
from launch.terminal import Terminal
from tp.cores import own_cores
from tp.defaults import PREFILL_CHUNK
from tp.planning.calibration import fit_rates
from tp.planning.hardware import Fabric, Profile, Rates
from tp.planning.precision import Precision

USUAL_DEGREES = (1, 2)


def calibrate(arguments: argparse.Namespace, terminal: Terminal) -> None:
    """Measures, fits, and writes --out.

    Raises:
        RequestError: --out cannot be written, or the times make no profile. ContestantError: a rank did not start, or
            did not answer.
    """
    degrees = sorted({*arguments.tp.named, *arguments.tp.ranged}) if arguments.tp else list(USUAL_DEGREES)
    dtype = "bfloat16" if arguments.dtype == "auto" else arguments.dtype
    profile = make_profile(measure(degrees, dtype, SYNTHETIC), Precision.of(dtype))
    text = profile.to_json()
    write("--out", arguments.out, text.encode())
    if arguments.json:
        terminal.show(json.dumps(json.loads(text)) + "\n")
    else:
        terminal.show("\n".join(_summary_lines(profile)) + "\n")


def measure(degrees: Sequence[int], dtype: str, subjects: Sequence[Subject], rounds: int = ROUNDS) -> Measurements:
    """The ranks, their collectives, and the subjects.

    Raises:
        ContestantError: a rank did not start, or did not answer.
    """
    measured = Measurements()
    for degree in degrees:
        measure_ranks(degree, measured)
    measure_models(degrees, dtype, subjects, measured, rounds)
    return measured


def make_profile(measured: Measurements, precision: Precision) -> Profile:
    """The profile that explains what was measured.

    Raises:
        RequestError: see `fit_rates`.
    """
    degrees, cores = measured.degrees, len(own_cores())
    fabric = Fabric(measured=tuple(measured.collectives))
    rates: dict[int, Rates] = {}
    for degree in degrees:
        alone = rates.get(1) if degree > 1 else None
        rates[degree] = fit_rates(measured.observations(degree), precision, degree, fabric, PREFILL_CHUNK, alone)
    reads = ", ".join(f"{rate:.1f} GB/s in {degree} processes" for degree, rate in measured.read_gb_per_s.items())
    return Profile(
        name=f"{cores} core{'s' if cores > 1 else ''}",
        device="cpu",
        ranks_per_node=max(degrees),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        shares_memory=True,
        runtime_bytes=measured.runtime_bytes,
        rates=rates,
        fabric=fabric,
        sources={
            "all": "launch plan --calibrate, on the machine itself",
            "rates": f"fitted to prefill and decode of {len(CONFIGS)} small models with random weights",
            "read": f"a plain read of memory in the same rounds gave {reads}, all processes together",
            "measured": "medians of single collectives through the ranks' communicator, 1 KiB to 4 MiB",
            "runtime": "peak resident size of a rank after a small generation, without the model's own bytes",
        },
    )


def _summary_lines(profile: Profile) -> list[str]:
    """The rates for people, a line a degree."""
    lines = [f"{profile.name}, {profile.memory_bytes / 1e9:.1f} GB, {profile.runtime_bytes / 1e6:,.0f} MB a process"]
    for degree, rates in profile.rates.items():
        (dtype, points), *_ = rates.matrix_flops_per_s.items()
        most = max(rate for _, rate in points) / 1e9
        reads = f"reads {rates.read_bytes_per_s / 1e9:.1f} GB/s, multiplies up to {most:,.0f} GFLOP/s in {dtype}"
        layer = f"a layer {1e6 * rates.captured_layer_s:.0f} µs captured, {1e6 * rates.eager_layer_s:.0f} µs else"
        lines.append(f"{'one rank' if degree == 1 else f'each of {degree} ranks'} {reads}; {layer}")
    return lines
