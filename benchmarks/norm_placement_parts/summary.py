"""What the measured values say: estimates with intervals beside what the paper derives, and t = 2 beside t = 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.norm_placement_parts.at_initialisation import DEPTHS, PLACEMENTS
from benchmarks.norm_placement_parts.intervals import (
    Estimate,
    Floats,
    bootstrapped,
    log_log_slope,
    mean_over_seeds,
    slope_between,
)
from benchmarks.norm_placement_parts.training import SEEDS_BY_LEARNING_RATE, Trial

Measured = dict[str, Any]
"""What one degree measured: "initialisation", "training", "checkpoints", each where it was run."""


def summarise(measured: Measured) -> dict[str, Any]:
    """Of the parts that were run."""
    summary: dict[str, Any] = {}
    if "initialisation" in measured:
        summary |= _of_states(measured["initialisation"]) | _of_gradients(measured["initialisation"])
    if "training" in measured:
        summary["held_out"] = _of_training(measured["training"])
    return summary


def post_sums(initialisation: dict[str, Any]) -> Floats:
    """[seeds, layers]"""
    return np.array(initialisation["post_sums"])


def pre_states(initialisation: dict[str, Any], tokens: str) -> Floats:
    """[seeds, layers], of "mean", "first" or "last" tokens."""
    return np.array([of_seed[tokens] for of_seed in initialisation["pre_states"]])


def last_layers(initialisation: dict[str, Any], placement: str, fact: str) -> Floats:
    """[seeds, depths]: "gradient" or "state" of the last layer."""
    of_depths = [initialisation["last_layers"][placement][str(depth)] for depth in DEPTHS]
    return np.array([[of_seed[fact] for of_seed in of_depth] for of_depth in of_depths]).T


def all_layers(initialisation: dict[str, Any], placement: str, fact: str) -> Floats:
    """[seeds, layers]: the same of every layer of the deepest model."""
    return np.array([of_seed[fact] for of_seed in initialisation["layers"][placement]])


def by_layer(values: Floats) -> list[Estimate]:
    """Of [seeds, layers]: the mean of each layer."""
    return [mean_over_seeds(of_layer) for of_layer in values.T]


def held_out(training: dict[str, Any], placement: str, warmup: bool, learning_rate: float) -> list[float]:
    """Of each seed."""
    seeds = range(SEEDS_BY_LEARNING_RATE[learning_rate])
    return [training[Trial(placement, warmup, learning_rate, seed).name]["held_out"] for seed in seeds]


def largest_differences(one: Measured, other: Measured) -> dict[str, float]:
    """By part: the largest |a − b| / |b| of the numbers that both degrees measured."""
    return {
        part: max(abs(a - b) / abs(b) for a, b in _pairs(other[part], one[part])) for part in one.keys() & other.keys()
    }


def _of_states(initialisation: dict[str, Any]) -> dict[str, Any]:
    sums, states, first = (
        post_sums(initialisation), pre_states(initialisation, "mean"), pre_states(initialisation, "first"),
    )  # fmt: skip
    layers = range(1, states.shape[1] + 1)
    return {
        "post_sum": mean_over_seeds(sums.mean(1)),
        "post_sum_layers_with_3/2_in_their_interval": sum(e.contains(1.5) for e in by_layer(sums)),
        "pre_state_layers_within_the_bounds": sum(
            1 + layer / 2 <= e.value <= 1 + 3 * layer / 2 for layer, e in zip(layers, by_layer(states), strict=True)
        ),
        "pre_state_last_layer": mean_over_seeds(states[:, -1]),
        "pre_state_growth_a_layer": mean_over_seeds((states[:, -1] - 1) / layers[-1]),
        "pre_state_growth_a_layer_of_first_token": mean_over_seeds((first[:, -1] - 1) / layers[-1]),
        "layers": layers[-1],
    }


def _of_gradients(initialisation: dict[str, Any]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for placement in PLACEMENTS:
        last = last_layers(initialisation, placement, "gradient")
        deepest = all_layers(initialisation, placement, "gradient")
        summary[f"{placement}_gradients"] = dict(zip(map(str, DEPTHS), by_layer(last), strict=True))
        summary[f"{placement}_gradient_slope"] = bootstrapped(log_log_slope(DEPTHS), last)
        summary[f"{placement}_gradient_of_last_over_first_layer"] = bootstrapped(_last_over_first, deepest)
    states, gradients = (last_layers(initialisation, "pre", fact) for fact in ("state", "gradient"))
    products = all_layers(initialisation, "pre", "gradient") * all_layers(initialisation, "pre", "state")
    return summary | {
        "pre_state_slope": bootstrapped(log_log_slope(DEPTHS), states),
        "pre_gradient_slope_against_state": bootstrapped(slope_between, np.stack([states, gradients], axis=-1)),
        "pre_gradient_times_state_of_last_over_first_layer": bootstrapped(_last_over_first, products),
    }


def _last_over_first(values: Floats) -> float:
    """Of the means over seeds of [seeds, layers]."""
    of_layers = values.mean(0)
    return float(of_layers[-1] / of_layers[0])


def _of_training(training: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for learning_rate in SEEDS_BY_LEARNING_RATE:
        for placement in PLACEMENTS:
            warm, cold = (held_out(training, placement, choice, learning_rate) for choice in (True, False))
            difference = mean_over_seeds(np.subtract(cold, warm))
            rows.append(
                {
                    "learning_rate": learning_rate,
                    "placement": placement,
                    "seeds": len(warm),
                    "warm_up": mean_over_seeds(warm),
                    "no_warm_up": mean_over_seeds(cold),
                    "no_warm_up_minus_warm_up": difference,
                }
            )
    return rows


def _pairs(some: Any, all_of_them: Any) -> Iterator[tuple[float, float]]:
    """Numbers at the same places; `some` may lack entries, and the last seeds."""
    if isinstance(some, dict):
        for key in some.keys() & all_of_them.keys():
            yield from _pairs(some[key], all_of_them[key])
    elif isinstance(some, list):
        for one, other in zip(some, all_of_them, strict=False):
            yield from _pairs(one, other)
    elif isinstance(some, (int, float)):
        yield float(some), float(all_of_them)
