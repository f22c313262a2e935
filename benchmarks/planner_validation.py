"""The planner beside what was measured: published numbers, and real runs on this machine.

    python -m benchmarks.planner_validation                        # published numbers, and the stored runs
    python -m benchmarks.planner_validation --measure MODEL ...    # calibrates, measures these models, and stores both

docs/planning.md reads the table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.planner_parts import all_reduce, gpt_fast, local_time, memory, weak_scaling
from benchmarks.planner_parts.comparison import Comparison, largest_error, mean_error
from launch.measurement.command_line import integers
from launch.planning import calibration
from launch.planning.machine import SYNTHETIC
from tp.planning.hardware import PROFILES, load_profile
from tp.planning.precision import Precision

PROFILE = PROFILES / "two-core-cpu.json"
DTYPE = "bfloat16"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, nargs="+", metavar="MODEL", help="directories or .gguf files")
    parser.add_argument("--tp", type=integers, default=[1, 2], metavar="T,...", help="degrees (default 1,2)")
    parser.add_argument("--runs", type=int, default=5, help="rounds that count (default 5)")
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure, arguments.tp, arguments.runs)
    report()


def measure(models: Sequence[Path], degrees: Sequence[int], rounds: int) -> None:
    """Calibrates and times the models in the same rounds; then their memory."""
    directories = [model for model in models if model.is_dir()]
    measured = calibration.measure(degrees, DTYPE, [*SYNTHETIC, *local_time.subjects(directories)], rounds)
    PROFILE.write_text(calibration.make_profile(measured, Precision.of(DTYPE)).to_json(), encoding="utf-8")
    rows = local_time.rows(directories, measured)
    local_time.STORED.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    runs = memory.measure(models, degrees)
    memory.STORED.write_text("\n".join(map(json.dumps, runs)) + "\n", encoding="utf-8")


def report() -> None:
    """Every comparison, section by section, with the errors that count."""
    constants = gpt_fast.fit()
    section("gpt-fast, tokens/s: fitted to 7B", gpt_fast.compare(gpt_fast.FITTED, constants))
    section("gpt-fast, tokens/s: 70B predicted", gpt_fast.compare(gpt_fast.PREDICTED, constants))
    without = gpt_fast.fit(cost_a_layer=False)
    section("gpt-fast, tokens/s: 70B without a cost a layer", gpt_fast.compare(gpt_fast.PREDICTED, without))
    left_out = [each for way in all_reduce.WAYS for each in all_reduce.leave_one_out(way)]
    plain = [each for way in all_reduce.WAYS for each in all_reduce.leave_one_out(way, all_reduce.plain_line)]
    section("all-reduce on Hopper, s: each size left out", left_out)
    section("all-reduce on Hopper, s: without a ramp", plain)
    section("all-reduce on Hopper, s: NCCL's own constants", all_reduce.nccl_of_its_own_model())
    section("Megatron-LM on V100, weak scaling", weak_scaling.compare(weak_scaling.fitted_profile()))
    if memory.STORED.exists() and local_time.STORED.exists():
        profile = load_profile(str(PROFILE))
        for name, compared in memory.compare(_lines(memory.STORED), profile).items():
            section(f"memory here, bytes: {name}", compared)
        section("time here, ms", local_time.compare(_lines(local_time.STORED), profile))


def section(title: str, compared: Sequence[Comparison]) -> None:
    """A title, a line for each number, and the errors of all."""
    print(f"\n{title}")
    for each in compared:
        print(f"  {each.name:<64} {each.predicted:>14,.5g} {each.measured:>14,.5g} {each.error:>+8.1%}")
    print(f"  mean error {mean_error(compared):.1%}, largest {largest_error(compared):.1%}")


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
