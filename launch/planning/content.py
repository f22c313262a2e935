"""A plan as the JSON object that `launch plan --json` prints; docs/planning.md gives its fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tp.planning.plan import (
    Placement,
    ServingPlan,
    TrainingPlan,
    Workload,
    fastest,
    most_productive,
    speed_up,
    training_speed_up,
)
from tp.planning.step_collectives import Collective
from tp.planning.step_time import StepTime


def serving_content(model: str, workload: Workload, plans: Sequence[ServingPlan]) -> dict[str, Any]:
    """Of serving at some degrees."""
    best = {"latency": fastest(plans), "throughput": most_productive(plans)}
    return {
        **_question(model, workload),
        "prefill_chunk": workload.chunk,
        "degrees": [_serving(workload, plan) for plan in plans],
        "best": {purpose: plan and plan.tp_size for purpose, plan in best.items()},
    }


def training_content(model: str, workload: Workload, plans: Sequence[TrainingPlan]) -> dict[str, Any]:
    """Of training at some degrees."""
    return {
        **_question(model, workload),
        "activation_checkpointing": workload.recomputed,
        "degrees": [_training(workload, plan) for plan in plans],
    }


def _question(model: str, workload: Workload) -> dict[str, Any]:
    profile, precision = workload.profile, workload.precision
    return {
        "model": model,
        "hardware": profile.name,
        "nodes": workload.nodes,
        "dtype": precision.dtype,
        "weights": "int8" if precision.row_scale_bytes else "plain",
        "batch": workload.batch,
        "context": workload.context,
        "sources": dict(profile.sources),
    }


def _serving(workload: Workload, plan: ServingPlan) -> dict[str, Any]:
    gain = speed_up(workload, plan)
    tokens = workload.batch * workload.context
    return {
        **_placement(plan.placement),
        "largest_batch": plan.largest_batch,
        "largest_context": plan.largest_context,
        "prefill": {**_time(plan.prefill), "tokens_per_s": tokens / plan.prefill.seconds},
        "decode": {**_time(plan.decode), "tokens_per_s": workload.batch / plan.decode.seconds},
        "speed_up": gain,
        "efficiency": gain / plan.tp_size,
        "throughput_tokens_per_s": plan.throughput,
        "throughput_batch": plan.served,
        "collectives": {
            "decode": _collectives(plan.decode_collectives),
            "prefill": _collectives(plan.prefill_collectives),
        },
    }


def _training(workload: Workload, plan: TrainingPlan) -> dict[str, Any]:
    gain = training_speed_up(workload, plan)
    tokens = workload.batch * workload.context
    return {
        **_placement(plan.placement),
        "largest_batch": plan.largest_batch,
        "activations": {"replicated": plan.replicated, "sharded": plan.sharded},
        "step": {**_time(plan.step), "tokens_per_s": tokens / plan.step.seconds},
        "speed_up": gain,
        "efficiency": gain / plan.tp_size,
        "collectives": {"step": _collectives(plan.collectives)},
    }


def _placement(placement: Placement) -> dict[str, Any]:
    return {
        "tp_size": placement.tp_size,
        "nodes": placement.nodes,
        "fits": placement.fits,
        "short_bytes": placement.short,
        "available_bytes": placement.available,
        "ranks": [{**asdict(memory), "total": memory.total} for memory in placement.memory],
    }


def _time(time: StepTime) -> dict[str, Any]:
    return {"seconds": time.seconds, "parts": asdict(time)}


def _collectives(collectives: Sequence[Collective]) -> dict[str, Any]:
    return {
        "calls": sum(each.count for each in collectives),
        "bytes": sum(each.count * each.nbytes for each in collectives),
        "each": [asdict(each) for each in collectives],
    }
