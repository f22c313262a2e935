"""Costs from times: non-negative least squares, lines with a ramp, and rates from the times of small models."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from launch.planning.synthetic import CASES, CONFIGS
from tp.errors import RequestError
from tp.planning.calibration import Observation, fit_rates
from tp.planning.collectives import OPERATIONS, Line
from tp.planning.fitting import fit_line, fit_nonnegative
from tp.planning.hardware import ANY_DEGREE, Fabric, MeasuredCollective, Profile, Rates
from tp.planning.parameters import distinct_ranks
from tp.planning.precision import Precision
from tp.planning.step_time import step_time, total
from tp.planning.work import decode_work, prefill_work

PRECISION = Precision.of("bfloat16")


def _sum(row, coefficients):
    return sum(a * c for a, c in zip(row, coefficients, strict=True))


def _loss(rows, times, coefficients):
    return sum((_sum(row, coefficients) / time - 1) ** 2 for row, time in zip(rows, times, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_no_step_that_is_allowed_lowers_the_loss(seed):
    """The conditions of Karush, Kuhn and Tucker, by trying: up from every coefficient, and down where there is room."""
    draws = random.Random(seed)
    rows = [[10 ** draws.uniform(-3, 3) * scale for scale in (1, 1e-6, 1e4, 1e2)] for _ in range(9)]
    times = [10 ** draws.uniform(-2, 1) for _ in rows]
    found = fit_nonnegative(rows, times)
    least = _loss(rows, times, found)
    assert min(found) >= 0
    for column in range(4):
        step = 1e-3 / max(row[column] / time for row, time in zip(rows, times, strict=True))
        for change in (step, -step):
            moved = [value + (change if index == column else 0) for index, value in enumerate(found)]
            if moved[column] >= 0:
                assert _loss(rows, times, moved) >= least - 1e-9


def test_exact_times_give_their_coefficients_back():
    wanted = [3e-6, 0.0, 2e-12]
    rows = [[1.0, math.sqrt(n), float(n)] for n in (1000, 20_000, 300_000, 4_000_000)]
    times = [_sum(row, wanted) for row in rows]
    assert fit_nonnegative(rows, times) == pytest.approx(wanted, abs=1e-15)


def test_a_column_that_others_make_up_is_left_out():
    rows = [[1.0, 2.0, 3.0], [2.0, 1.0, 3.0], [5.0, 1.0, 6.0]]
    found = fit_nonnegative(rows, [3.0, 3.0, 6.0])
    assert [_sum(row, found) for row in rows] == pytest.approx([3.0, 3.0, 6.0])


def test_a_line_finds_its_ramp():
    line = Line(5e-6, 2e-9, 1e-11)
    sizes = [4**power for power in range(5, 13)]
    found = fit_line(sizes, [line.cost(size).seconds for size in sizes])
    assert (found.latency_s, found.ramp_s, found.s_per_byte) == pytest.approx((5e-6, 2e-9, 1e-11), rel=1e-6)


def _rates(captured_collective_s: float | None) -> Rates:
    read = 17e9
    points = ((1, read), (2, 1.8 * read), (4, 40e9), (8, 60e9), (16, 75e9), (64, 85e9), (128, 90e9), (512, 110e9))
    return Rates(
        read_bytes_per_s=read,
        matrix_flops_per_s={"bfloat16": points},
        attention_flops_per_s=30e9,
        stream_bytes_per_s=4e9,
        captured_layer_s=20e-6,
        eager_layer_s=300e-6,
        captured_step_s=400e-6,
        eager_step_s=5e-3,
        captured_collective_s=captured_collective_s,
        sampler_bytes_per_s=12e9,
        cache_bytes_per_s=6e9,
    )


def test_times_that_leave_none_for_reading_are_refused():
    """The more is read, the faster it was: noise, which gives no rate."""
    times = {"wide": 1e-3, "deep": 2e-3, "thin": 9e-3}
    observations = [Observation(CONFIGS[name], "decode", 1, 28, seconds) for name, seconds in times.items()]
    for some in (observations, [Observation(CONFIGS["wide"], "prefill", 1, 128, 0.1)]):
        with pytest.raises(RequestError, match="leave none for reading memory"):
            fit_rates(some, PRECISION, 1, Fabric(), 512)


def _observed(made: Rates, fabric: Fabric, tp_size: int) -> list[Observation]:
    """What would be timed of the small models at such rates."""
    profile = Profile("made up", "cpu", 2, 10**9, True, 0, {ANY_DEGREE: made}, fabric)
    observations = []
    for name, cases in CASES.items():
        (model,) = distinct_ranks(CONFIGS[name], PRECISION, tp_size)
        for case in cases:
            prompt = case.prompt_tokens
            if case.phase == "prefill":
                steps, context = prefill_work(model, case.batch, prompt, 512), prompt
            else:
                context = prompt + case.new_tokens // 2
                steps = [decode_work(model, case.batch, context)]
            seconds = total([step_time(step, PRECISION, profile, tp_size, 1) for step in steps]).seconds
            observations.append(Observation(CONFIGS[name], case.phase, case.batch, context, seconds))
    return observations


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_times_of_the_small_models_give_the_rates_that_made_them(tp_size):
    collectives = tuple(MeasuredCollective(each, 2, "measured", Line(12e-6, 0.0, 2e-10)) for each in OPERATIONS)
    fabric = Fabric(measured=collectives)
    made = _rates(captured_collective_s=9e-6 if tp_size > 1 else None)
    observations = _observed(made, fabric, tp_size)
    found = fit_rates(observations, PRECISION, tp_size, fabric, 512, _rates(None) if tp_size > 1 else None)
    assert found.read_bytes_per_s == pytest.approx(made.read_bytes_per_s, rel=0.03)
    assert found.sampler_bytes_per_s == pytest.approx(made.sampler_bytes_per_s, rel=0.1)
    assert found.cache_bytes_per_s == pytest.approx(made.cache_bytes_per_s, rel=0.1)
    assert found.captured_layer_s == pytest.approx(made.captured_layer_s, rel=0.05)
    assert found.eager_layer_s == pytest.approx(made.eager_layer_s, rel=0.05)
    for rows, rate in made.matrix_flops_per_s["bfloat16"]:
        assert found.flops_per_s("bfloat16", rows) == pytest.approx(rate, rel=0.05)
    if tp_size > 1:
        assert found.captured_collective_s == pytest.approx(9e-6, rel=0.1)


def test_the_latency_of_collectives_counts_once_where_one_rank_alone_was_not_measured():
    fabric = Fabric(
        measured=tuple(MeasuredCollective(each, 2, "measured", Line(90e-6, 0.0, 0.0)) for each in OPERATIONS)
    )
    observations = _observed(_rates(captured_collective_s=9e-6), fabric, 2)
    again = _observed(fit_rates(observations, PRECISION, 2, fabric, 512), fabric, 2)
    for before, after in zip(observations, again, strict=True):
        if before.phase == "decode":
            assert after.seconds == pytest.approx(before.seconds, rel=0.05)


def test_what_no_time_is_left_for_is_not_predicted_on_top():
    """The more attention, the faster it was: its FLOPs count as those of products, and the times are met."""
    without, usual = (
        _observed(replace(_rates(None), attention_flops_per_s=rate), Fabric(), 1) for rate in (1e18, 1e12)
    )
    observations = [
        replace(one, seconds=2 * one.seconds - other.seconds) for one, other in zip(without, usual, strict=True)
    ]
    found = fit_rates(observations, PRECISION, 1, Fabric(), 512)
    again = _observed(found, Fabric(), 1)
    ratios = [b.seconds / a.seconds for a, b in zip(observations, again, strict=True) if a.context == 512]
    assert found.attention_flops_per_s == pytest.approx(found.flops_per_s("bfloat16", 512))
    assert math.fsum(ratios) / len(ratios) == pytest.approx(1, abs=0.02), ratios
