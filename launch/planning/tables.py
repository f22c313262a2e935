"""A plan as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from launch.report import size
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

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

PARTS = {
    "products_s": "products",
    "attention_s": "attention",
    "stream_s": "stream",
    "layers_s": "fixed cost: layers",
    "step_s": "fixed cost: steps",
    "latency_s": "collectives: latency",
    "bandwidth_s": "collectives: bytes",
    "optimizer_s": "optimizer",
}
"""Headings of the parts of a step's time, as `StepTime` has them."""


def print_serving(console: Console, model: str, workload: Workload, plans: Sequence[ServingPlan]) -> None:
    """Memory, speed, the parts of a decode step and of a prefill, and what is best."""
    console.print(_title(model, workload, "serving"), markup=False)
    console.print(_serving_memory(workload, plans))
    console.print(_serving_speed(workload, plans))
    console.print(_parts("a decode step", {plan.tp_size: plan.decode for plan in plans}))
    console.print(
        _parts(f"the prefill in steps of {workload.chunk:,} tokens", {plan.tp_size: plan.prefill for plan in plans})
    )
    for line in _advice(plans):
        console.print(line, markup=False)


def print_training(console: Console, model: str, workload: Workload, plans: Sequence[TrainingPlan]) -> None:
    """Memory, speed and the parts of a training step."""
    console.print(_title(model, workload, "training"), markup=False)
    console.print(_training_memory(plans))
    console.print(_training_speed(workload, plans))
    console.print(_parts("a training step", {plan.tp_size: plan.step for plan in plans}))


def shortage(placement: Placement) -> str:
    """By how much a degree does not fit, and what takes most of the room."""
    worst = placement.worst
    parts = {name: value for name, value in vars(worst).items() if value}
    largest = max(parts, key=lambda name: parts[name])
    return (
        f"--tp {placement.tp_size} needs {size(worst.total)} on a rank, {size(parts[largest])} of it for {largest}, "
        f"and has {size(placement.available)}: {size(placement.short)} too little"
    )


def _title(model: str, workload: Workload, purpose: str) -> str:
    precision, profile = workload.precision, workload.profile
    numbers = f"{precision.dtype} with int8 weights" if precision.row_scale_bytes else precision.dtype
    nodes = "1 node" if workload.nodes == 1 else f"{workload.nodes} nodes"
    return f"{purpose} {model} in {numbers} on {profile.name}, {nodes}: {amount(workload)}"


def amount(workload: Workload) -> str:
    """How many tokens of how many sequences."""
    rows = "1 sequence" if workload.batch == 1 else f"{workload.batch:,} sequences"
    return f"{rows} of {workload.context:,} tokens"


def _new_table(title: str, headings: Sequence[str]) -> Table:
    from rich.box import ROUNDED
    from rich.table import Table

    table = Table(box=ROUNDED, title=title, title_justify="left", title_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _serving_memory(workload: Workload, plans: Sequence[ServingPlan]) -> RenderableType:
    headings = ("ranks", "nodes", "weights", "KV cache", "activations", "others", "in all", "has", "fits")
    table = _new_table("Memory of the rank that takes most", (*headings, "largest batch", "longest context"))
    for plan in plans:
        worst = plan.placement.worst
        table.add_row(
            *_of_placement(plan.placement),
            size(worst.weights),
            size(worst.cache),
            size(worst.activations),
            size(worst.buffers + worst.runtime),
            *_room(plan.placement),
            f"{plan.largest_batch:,}",
            _longest_context(workload, plan),
        )
    return table


def _training_memory(plans: Sequence[TrainingPlan]) -> RenderableType:
    headings = ("ranks", "nodes", "weights", "gradients", "moments", "activations", "replicated / sharded")
    table = _new_table("Memory of the rank that takes most", (*headings, "in all", "has", "fits", "most rows"))
    for plan in plans:
        worst = plan.placement.worst
        table.add_row(
            *_of_placement(plan.placement),
            size(worst.weights),
            size(worst.gradients),
            size(worst.moments),
            size(worst.activations),
            f"{size(plan.replicated)} / {size(plan.sharded)}",
            *_room(plan.placement),
            f"{plan.largest_batch:,}",
        )
    return table


def _serving_speed(workload: Workload, plans: Sequence[ServingPlan]) -> RenderableType:
    headings = ("ranks", "prefill", "prompt tokens/s", "decode step", "tokens/s", "speed-up", "efficiency")
    table = _new_table("Speed", (*headings, "collectives a decode step", "throughput: tokens/s and rank"))
    for plan in plans:
        gain = speed_up(workload, plan)
        table.add_row(
            str(plan.tp_size),
            milliseconds(plan.prefill.seconds),
            f"{workload.batch * workload.context / plan.prefill.seconds:,.0f}",
            milliseconds(plan.decode.seconds),
            f"{workload.batch / plan.decode.seconds:,.1f}",
            f"{gain:.2f}x",
            f"{gain / plan.tp_size:.0%}",
            _counted(plan.decode_collectives),
            _throughput(plan) if plan.throughput else "-",
        )
    return table


def _training_speed(workload: Workload, plans: Sequence[TrainingPlan]) -> RenderableType:
    headings = ("ranks", "step", "tokens/s", "speed-up", "efficiency", "collectives a step")
    table = _new_table("Speed", headings)
    for plan in plans:
        gain = training_speed_up(workload, plan)
        table.add_row(
            str(plan.tp_size),
            milliseconds(plan.step.seconds),
            f"{workload.batch * workload.context / plan.step.seconds:,.0f}",
            f"{gain:.2f}x",
            f"{gain / plan.tp_size:.0%}",
            _counted(plan.collectives),
        )
    return table


def _parts(what: str, times: dict[int, StepTime]) -> RenderableType:
    """Rows of degrees, columns of the parts that take any time."""
    shown = [part for part in PARTS if any(getattr(time, part) for time in times.values())]
    table = _new_table(f"Parts of {what}, ms", ("ranks", *(PARTS[part] for part in shown)))
    for tp_size, time in times.items():
        table.add_row(str(tp_size), *(f"{1e3 * getattr(time, part):,.3f}" for part in shown))
    return table


def _advice(plans: Sequence[ServingPlan]) -> list[str]:
    lines = [f"does not fit: {shortage(plan.placement)}" for plan in plans if not plan.placement.fits]
    quick, busy = fastest(plans), most_productive(plans)
    if quick is not None:
        lines.append(f"best for latency: --tp {quick.tp_size}, {milliseconds(quick.decode.seconds)} a decode step")
    if busy is not None:
        lines.append(f"best for throughput: --tp {busy.tp_size}, tokens/s and rank: {_throughput(busy)}")
    return lines


def milliseconds(seconds: float) -> str:
    """A time for people."""
    return f"{1e3 * seconds:,.2f} ms"


def _longest_context(workload: Workload, plan: ServingPlan) -> str:
    """The model may end before the room does."""
    limit = " (the model's)" if plan.largest_context == workload.config.longest_context else ""
    return f"{plan.largest_context:,}{limit}"


def _throughput(plan: ServingPlan) -> str:
    return f"{plan.throughput / plan.tp_size:,.1f} at batch {plan.served:,}"


def _of_placement(placement: Placement) -> tuple[str, str]:
    return str(placement.tp_size), str(placement.nodes)


def _room(placement: Placement) -> tuple[str, str, str]:
    fits = "yes" if placement.fits else f"{size(placement.short)} too little"
    return size(placement.worst.total), size(placement.available), fits


def _counted(collectives: Sequence[Collective]) -> str:
    if not collectives:
        return "none"
    return f"{sum(c.count for c in collectives):,}, {size(sum(c.count * c.nbytes for c in collectives))}"
