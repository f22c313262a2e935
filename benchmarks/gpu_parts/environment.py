"""What is there: versions, device, compiler."""

from __future__ import annotations

import platform
import shutil

import torch

from benchmarks.gpu_parts.machine import Machine
from benchmarks.gpu_parts.record import Record
from launch.measurement.copy_bandwidth import copy_bandwidth


def run(record: Record, machine: Machine) -> None:
    """Records them, and how fast the device copies."""
    with record.attempt("versions") as found:
        found.update(python=platform.python_version(), torch=torch.__version__, cuda=torch.version.cuda)
        found["compiler"] = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        import triton

        found["triton"] = triton.__version__
    if machine.compiles:
        with record.attempt("device") as found:
            facts = torch.cuda.get_device_properties(machine.device)
            free, total = torch.cuda.mem_get_info(machine.device)
            found.update(
                device=facts.name, capability=f"{facts.major}.{facts.minor}",
                multiprocessors=facts.multi_processor_count, free_gb=free / 1e9, total_gb=total / 1e9,
            )  # fmt: skip
        with record.attempt("copy bandwidth") as found:
            copied = copy_bandwidth(machine.device)
            found.update(gb_per_s=copied.median / 1e9, slowest=copied.minimum / 1e9, fastest=copied.maximum / 1e9)
