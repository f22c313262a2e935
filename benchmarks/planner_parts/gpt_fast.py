"""gpt-fast's tokens a second on A100s: constants fitted to Llama-2-7B predict Llama-2-70B.

gpt-fast holds the embedding and the output matrix whole on every rank, and so has two all-reduces a layer and no other
collective; the work that is timed here is the planner's with those two differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.planner_parts.comparison import Comparison, read_data
from tp.config import ModelConfig
from tp.planning.collectives import ALL_REDUCE, Link
from tp.planning.fitting import fit_nonnegative
from tp.planning.hardware import ANY_DEGREE, Profile, load_profile
from tp.planning.parameters import distinct_ranks
from tp.planning.precision import Precision
from tp.planning.step_collectives import Collective
from tp.planning.step_time import step_time
from tp.planning.work import Product, StepWork, decode_work

PRECISION = Precision.of("bfloat16")
CONTEXT = 105
"""Of a step half way through the generation: 5 tokens of prompt, and half of 200 new ones."""
FITTED, PREDICTED = "Llama-2-7B", "Llama-2-70B"


@dataclass(frozen=True)
class Constants:
    """What is fitted.

    Attributes:
        read_bytes_per_s: of weights and cache.
        layer_s: of each layer; 0 where bandwidth and latency alone are to explain everything.
        latency_s: of a one-shot all-reduce.
    """

    read_bytes_per_s: float
    layer_s: float
    latency_s: float


def measured(model: str) -> dict[int, float]:
    """Published tokens a second by number of GPUs."""
    return {int(gpus): rate for gpus, rate in read_data("gpt-fast.json")["models"][model]["tokens_per_s"].items()}


def work(model: str, gpus: int) -> StepWork:
    """One step of one rank as gpt-fast does it."""
    fields: Mapping[str, Any] = read_data("gpt-fast.json")["models"][model]["config"]
    config = ModelConfig.from_hf(fields)
    rank = distinct_ranks(config, PRECISION, gpus)[0]
    whole = distinct_ranks(config, PRECISION, 1)[0].parameters.head
    step = decode_work(rank, 1, CONTEXT)
    sums = (Collective(ALL_REDUCE, rank.row_bytes, 2 * config.num_layers),) if gpus > 1 else ()
    return replace(step, products=(*step.products[:-1], Product(1, whole, 1)), collectives=sums)


def profile_with(constants: Constants) -> Profile:
    """The machine with these constants in place of the profile's own."""
    profile = load_profile("A100-80G-330W")
    rates = replace(
        profile.rates[ANY_DEGREE],
        read_bytes_per_s=constants.read_bytes_per_s,
        stream_bytes_per_s=constants.read_bytes_per_s,
        captured_layer_s=constants.layer_s,
        captured_step_s=0.0,
    )
    assert profile.fabric.link is not None
    link = Link(constants.latency_s, profile.fabric.link.bytes_per_s)
    fabric = replace(profile.fabric, link=link, nccl=None, algorithms=("one_shot",))
    return replace(profile, rates={ANY_DEGREE: rates}, fabric=fabric)


def fit(*, cost_a_layer: bool = True) -> Constants:
    """Constants that explain the smaller model's steps, in the least-squares sense of `fit_nonnegative`.

    Args:
        cost_a_layer: whether there is such a cost, or bandwidth and latency alone.
    """
    rows, times = [], []
    free = profile_with(Constants(1e30, 0.0, 0.0))
    for gpus, rate in measured(FITTED).items():
        step = work(FITTED, gpus)
        weights = sum(product.count * product.matrix.nbytes(PRECISION) for product in step.products)
        nbytes = weights + step.cache_bytes + step.stream_bytes
        row = [float(nbytes), float(sum(each.count for each in step.collectives))]
        rows.append([*row, float(step.num_layers)] if cost_a_layer else row)
        times.append(1 / rate - step_time(step, PRECISION, free, gpus, 1).bandwidth_s)
    coefficients = fit_nonnegative(rows, times)
    return Constants(1 / coefficients[0], coefficients[2] if cost_a_layer else 0.0, coefficients[1])


def compare(model: str, constants: Constants) -> list[Comparison]:
    """Predicted tokens a second beside the published ones."""
    profile = profile_with(constants)
    return [
        Comparison(f"{model}, {gpus} GPUs", 1 / step_time(work(model, gpus), PRECISION, profile, gpus, 1).seconds, rate)
        for gpus, rate in measured(model).items()
    ]
