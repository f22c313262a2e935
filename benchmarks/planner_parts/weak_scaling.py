"""Megatron-LM's weak scaling on V100s: the matrix rate is fitted to one GPU, the curve is predicted."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.planner_parts.comparison import Comparison, read_data
from tp.config import ModelConfig
from tp.planning.hardware import ANY_DEGREE, Profile, load_profile
from tp.planning.parameters import RankParameters
from tp.planning.plan import Workload, training_time
from tp.planning.precision import Precision
from tp.planning.step_time import StepTime
from tp.rope_config import RopeConfig


def workload(run: dict[str, int], profile: Profile) -> Workload:
    """A GPT-2 of the published shape: LayerNorm, a plain MLP four times as wide, biases, tied tables.

    Its learned positions, 1,024 rows of the embedding, are left out.
    """
    data = read_data("megatron-weak-scaling.json")
    config = ModelConfig(
        model_type="tp_decoder",
        hidden_size=run["hidden_size"],
        num_layers=run["layers"],
        num_attention_heads=run["heads"],
        num_kv_heads=run["heads"],
        head_dim=run["hidden_size"] // run["heads"],
        intermediate_size=4 * run["hidden_size"],
        vocab_size=data["vocab_size"],
        max_position_embeddings=data["sequence"],
        rope=RopeConfig(),
        norm="layer_norm",
        gated_mlp=False,
        activation="gelu",
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    )
    return Workload(
        config,
        Precision.of("float16"),
        profile,
        batch=data["batch"],
        context=data["sequence"],
        sharded=False,
        recomputed=True,
    )


def fitted_profile() -> Profile:
    """The V100 whose matrix rate gives the published time of one GPU."""
    profile, run = load_profile("V100-DGX2H"), read_data("megatron-weak-scaling.json")["runs"][0]
    slow, fast = 1e12, 1e15
    for _ in range(60):
        rate = (slow * fast) ** 0.5
        seconds = training_time(workload(run, _with_rate(profile, rate)), 1).seconds
        slow, fast = (rate, fast) if seconds > run["iteration_ms"] / 1e3 else (slow, rate)
    return _with_rate(profile, slow)


def times(profile: Profile) -> dict[int, StepTime]:
    """Of an iteration, by number of GPUs."""
    runs = read_data("megatron-weak-scaling.json")["runs"]
    return {run["gpus"]: training_time(workload(run, profile), run["gpus"]) for run in runs}


def compare(profile: Profile) -> list[Comparison]:
    """Predicted weak scaling beside the published, as shares of the ideal."""
    runs = read_data("megatron-weak-scaling.json")["runs"]
    predicted = times(profile)
    first = RankParameters.of(workload(runs[0], profile).config, 1, 0).elements
    compared = []
    for run in runs:
        growth = RankParameters.of(workload(run, profile).config, 1, 0).elements / first
        scaling = growth / run["gpus"] * predicted[1].seconds / predicted[run["gpus"]].seconds
        compared.append(Comparison(f"{run['billions']:g} B on {run['gpus']}", scaling, run["weak_scaling"]))
    return compared


def _with_rate(profile: Profile, flops_per_s: float) -> Profile:
    rates = replace(profile.rates[ANY_DEGREE], matrix_flops_per_s={"float16": ((1, flops_per_s),)})
    return replace(profile, rates={ANY_DEGREE: rates})
