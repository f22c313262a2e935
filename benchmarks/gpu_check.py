"""Checks and times everything that needs a GPU, in one command of at most six minutes.

    python benchmarks/gpu_check.py [--json FILE] [--cpu]

Needs one CUDA device, torch and Triton with a C compiler, and nothing else. Kernels are compared with float64 or their
plain forms and timed beside the copy bandwidth and torch.compile; random models of known shapes decode; two ranks share
the GPU to check their communication; a training step is compared with float64. Each part is a process of its own with
a limit on its time, and whatever fails is a line of the result: the others go on. The exit status tells if all held.

--cpu is a dry run in Triton's interpreter, at tiny sizes: it tests this program, and times nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUDGETS_S = {
    "environment": 20.0, "kernel_values": 90.0, "decoding": 90.0, "communication": 40.0, "training": 25.0,
    "kernel_times": 110.0,
}  # fmt: skip
"""The parts in their order, what matters most first, and how long each may take at most."""
TOTAL_S = 350.0
SHOWN = (
    "milliseconds", "tokens_per_s", "gigabytes_per_second", "share_of_copy_bandwidth", "times_as_fast_as_torch",
    "device", "torch", "triton", "cuda", "gb_per_s",
)  # fmt: skip
"""Of each result, what the table shows; the JSON has all."""


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all results")
    parser.add_argument("--cpu", action="store_true", help="a dry run without a GPU")
    parser.add_argument("--parts", default=",".join(BUDGETS_S), help="which, separated by commas (default: all)")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)  # in a process of a part: where results go
    return parser.parse_args()


def run_parts(arguments: argparse.Namespace) -> None:
    """In a process of its own: runs the parts one after the other."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "triton_kernels")]
    if arguments.cpu:
        _interpret()
    from benchmarks.gpu_parts.machine import the_cpu, the_gpu
    from benchmarks.gpu_parts.record import Record

    machine = the_cpu() if arguments.cpu else the_gpu()
    for part in arguments.parts.split(","):
        record = Record(arguments.record, part)
        with record.attempt("the part itself"):
            importlib.import_module(f"benchmarks.gpu_parts.{part}").run(record, machine)


def _interpret() -> None:
    """Triton reads the variable when it is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    import interpreter_repairs

    from tp import choice

    interpreter_repairs.install()
    choice.disable("native")


def results_of(parts: str, seconds: float, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Starts a process for some parts and gives what they recorded; how the process ended, if it did not end well."""
    with tempfile.TemporaryDirectory() as directory:
        path, output = Path(directory) / "record", Path(directory) / "output"
        command = [sys.executable, __file__, "--parts", parts, "--record", str(path), *(["--cpu"] * arguments.cpu)]
        began = time.monotonic()
        with output.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
            try:
                ending = f"ended with status {process.wait(seconds)}"
            except subprocess.TimeoutExpired:
                ending = f"was ended after {seconds:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its ranks too
                process.wait()
        results = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        last = {"part": parts, "name": "the process", "seconds": time.monotonic() - began}
        if process.returncode:
            last |= {"failure": ending, "trace": output.read_text(errors="replace")[-2000:]}
        return [*results, last]


def line_of(result: dict[str, Any]) -> str:
    """A result as a person reads it."""
    if "failure" in result:
        return f"{'FAILED':8}{result['part']}: {result['name']}: {result['failure']}"
    names = [name for name in SHOWN if name in result]
    names += [name for name in result if name.endswith(("_ulps", "_error"))]
    shown = [f"{name.replace('_', ' ')} {_text(result[name])}" for name in names[:6]]
    return f"{'ok':8}{result['part']}: {result['name']}" + (f": {', '.join(shown)}" if shown else "")


def _text(value: Any) -> str:
    if isinstance(value, dict):  # of a `Spread`
        value = value["median"]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show(results: Iterable[dict[str, Any]]) -> None:
    for result in results:
        print(line_of(result), flush=True)


def main() -> int:
    arguments = parsed_arguments()
    if arguments.record:
        run_parts(arguments)
        return 0
    began = time.monotonic()
    results: list[dict[str, Any]] = []
    for parts in [arguments.parts] if arguments.cpu else arguments.parts.split(","):
        left = TOTAL_S - (time.monotonic() - began)
        budget = sum(BUDGETS_S[part] for part in parts.split(","))
        found = results_of(parts, max(1.0, min(budget, left)), arguments)
        show(found)
        results += found
    failures = sum("failure" in result for result in results)
    print(f"{len(results)} results, {failures} failed, {time.monotonic() - began:.0f} s")
    if arguments.json:
        content = {"date": datetime.date.today().isoformat(), "dry_run": arguments.cpu, "results": results}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
