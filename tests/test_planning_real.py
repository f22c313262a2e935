"""The planner beside real runs on one machine, whose measurements are stored with the machine's profile."""

from __future__ import annotations

import json
import statistics

import pytest

from benchmarks.planner_parts import local_time, memory
from benchmarks.planner_parts.comparison import largest_error
from benchmarks.planner_validation import PROFILE
from tp.planning.hardware import load_profile


@pytest.fixture(scope="module")
def profile():
    return load_profile(str(PROFILE))


def stored(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_weights_and_cache_are_exact_and_the_peak_is_within_ten_percent(profile):
    runs = stored(memory.STORED)
    assert {(run["model"], run["tp_size"]) for run in runs} >= {("smollm2-135m", 1), ("qwen2.5-coder-0.5b", 2)}
    compared = memory.compare(runs, profile)
    assert all(each.predicted == each.measured for each in compared["weights"] + compared["cache"])
    assert largest_error(compared["peak"]) <= 0.10


def test_times_are_as_near_as_the_page_says(profile):
    compared = local_time.compare(stored(local_time.STORED), profile)
    of_prefill, of_decode = (
        [abs(each.error) for each in compared if phase in each.name] for phase in ("prefill", "decode")
    )
    assert len(of_prefill) == len(of_decode) == 16
    assert sum(error <= 0.15 for error in of_prefill) == 15
    assert max(of_prefill) <= 0.1535 and statistics.median(of_prefill) == pytest.approx(0.036, abs=5e-4)
    assert max(of_decode) <= 0.1255 and statistics.median(of_decode) == pytest.approx(0.053, abs=5e-4)
