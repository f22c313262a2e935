"""Thousands of damaged inputs: each is read to the right values or refused in a line or two, within limits.

What is damaged and what is right is in `fuzz_targets`, the damage in `mutations`, the limits in `fuzz_worker`.
Named faults are in test_trust_files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fuzz_targets import TARGETS

HERE = Path(__file__).parent
FEW, MANY = 40, 1500
"""Inputs of each target."""
SECONDS_AN_INPUT = 0.5
"""More than any target takes on average, on a busy machine."""


def fuzzed(directory: Path, first: int, count: int, targets: list[str]) -> dict[str, dict[str, Any]]:
    """The results of the targets by their names, see `fuzz_worker`; a crash or a hang is a failure with its seed."""
    command = [sys.executable, str(HERE / "fuzz_worker.py"), str(directory), str(first), str(count), *targets]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in environment.items() if name not in ("RANK", "WORLD_SIZE")}
    with (directory / "out").open("wb") as out, (directory / "err").open("wb") as err:
        ended = subprocess.run(
            command, stdout=out, stderr=err, env=environment, timeout=60 + SECONDS_AN_INPUT * count * len(targets)
        )
    records = [json.loads(line) for line in (directory / "out").read_text().splitlines()]
    assert ended.returncode == 0, f"at {records[-1:]}: {(directory / 'err').read_text(errors='replace')[-2000:]}"
    return {record["target"]: record for record in records if "loaded" in record}


def check(results: Mapping[str, dict[str, Any]], count: int) -> None:
    for name, result in results.items():
        broken = "\n".join(f"{name} {seed}: {said}" for seed, said in result["broken"][:5])
        assert not result["broken"], f"{len(result['broken'])} of {count} inputs break a promise\n{broken}"
        assert result["loaded"] + result["refused"] == count
        assert result["loaded"] and result["refused"], f"{name}: {result}: the damage is too small, or too large"


def test_a_few_damaged_inputs_of_every_kind(tmp_path: Path) -> None:
    results = fuzzed(tmp_path, 0, FEW, list(TARGETS))
    assert results.keys() == TARGETS.keys()
    check(results, FEW)


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_many_damaged_inputs(target: str, tmp_path: Path) -> None:
    results = fuzzed(tmp_path, 1000, MANY, [target])
    check(results, MANY)
    (result,) = results.values()
    print(f"{target}: {result['loaded']} read, {result['refused']} refused, at most {result['seconds']:.2f} s "
          f"and {result['bytes'] / 2**20:.0f} MiB")  # fmt: skip
