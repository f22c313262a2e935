"""Times of the kernels: `benchmarks/kernels.py`, each case on its own."""

from __future__ import annotations

from benchmarks.gpu_parts.machine import Machine
from benchmarks.gpu_parts.record import Record
from benchmarks.kernels import all_cases, measure
from launch.measurement.copy_bandwidth import copy_bandwidth


def run(record: Record, machine: Machine) -> None:
    """Beside the copy bandwidth and torch.compile; in a dry run, each case once."""
    if not machine.compiles:
        for case in all_cases(machine.device, machine.kernels):
            with record.attempt(f"{case.operation} {case.size}"):
                case.ours()
        return
    copied = copy_bandwidth(machine.device).median
    for case in all_cases(machine.device, machine.kernels):
        with record.attempt(f"{case.operation} {case.size}") as found:
            found.update(measure(case, machine.device, machine.runs, copied))
