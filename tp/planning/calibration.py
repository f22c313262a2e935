"""From measured times of a few small models to the rates of a rank.

Every time is a sum of what the step asks for, each at a rate that is not known yet: bytes of weights and cache that
are read, FLOPs of products with so many rows, FLOPs of attention, bytes of what is no product, logits that tokens are
chosen from, layers and steps. The rates are those that explain all times of a degree best, see `fit_nonnegative`; what
they leave no time for is counted with what it is most like: sampling with the stream, the stream with reading,
attention with products of most rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tp.config import ModelConfig
from tp.errors import RequestError
from tp.planning.fitting import fit_nonnegative
from tp.planning.hardware import Fabric, Rates
from tp.planning.parameters import RankModel, distinct_ranks
from tp.planning.precision import Precision
from tp.planning.work import StepWork, decode_work, prefill_work

Phase = Literal["prefill", "decode"]
READ, ATTENTION, STREAM, SAMPLER = "read", "attention", "stream", "sampler"
"""Columns of the fit, beside those of FLOPs by rows, and of layers and steps."""


@dataclass(frozen=True)
class Observation:
    """A measured time.

    Attributes:
        config: of the model.
        phase: prefill is the time to the first token of all sequences; decode is that of one step.
        batch: sequences.
        context: tokens of each; in decode, half way through what was timed.
        seconds: median.
    """

    config: ModelConfig
    phase: Phase
    batch: int
    context: int
    seconds: float


def fit_rates(
    observations: Sequence[Observation],
    precision: Precision,
    tp_size: int,
    fabric: Fabric,
    chunk: int,
    alone: Rates | None = None,
) -> Rates:
    """Rates at one degree.

    Args:
        observations: at this degree.
        fabric: what the collectives take, where there are any.
        chunk: prompt tokens of a step.
        alone: rates of one rank. What a captured layer takes beyond those is its two collectives: waiting for the
            other ranks, beside the transfer.

    Raises:
        RequestError: the times are explained without any for reading.
    """
    columns: list[dict[str, float]] = []
    seconds = []
    for each in observations:
        steps = _steps(each, precision, tp_size, chunk)
        columns.append(_sum([_column(step, precision) for step in steps]))
        seconds.append(max(each.seconds - sum(_known_s(step, tp_size, fabric) for step in steps), each.seconds / 10))
    found = _costs(columns, seconds)
    for name, like in (SAMPLER, STREAM), (STREAM, READ), (ATTENTION, _most_rows(columns)):
        if like and not found.get(name):
            columns = [_counted_as(column, name, like) for column in columns]
            found = _costs(columns, seconds)
    return _with_collectives(_rates(found, precision), alone)


def _costs(columns: Sequence[dict[str, float]], seconds: Sequence[float]) -> dict[str, float]:
    """Seconds for one of each, by name."""
    names = sorted({name for column in columns for name in column})
    rows = [[column.get(name, 0.0) for name in names] for column in columns]
    return dict(zip(names, fit_nonnegative(rows, seconds), strict=True))


def _most_rows(columns: Sequence[dict[str, float]]) -> str:
    """The name of the products with most rows; empty where there are none."""
    rows = [_rows_of(name) for column in columns for name in column if _is_flops(name)]
    return _flops_name(max(rows)) if rows else ""


def _counted_as(column: dict[str, float], name: str, like: str) -> dict[str, float]:
    return {**column, name: 0.0, like: column.get(like, 0.0) + column.get(name, 0.0)}


def _steps(observation: Observation, precision: Precision, tp_size: int, chunk: int) -> list[StepWork]:
    """On the rank that has most to do."""
    model = max(distinct_ranks(observation.config, precision, tp_size), key=_busy)
    if observation.phase == "decode":
        return [decode_work(model, observation.batch, observation.context)]
    return prefill_work(model, observation.batch, observation.context, chunk)


def _busy(model: RankModel) -> int:
    return model.parameters.elements


def _column(step: StepWork, precision: Precision) -> dict[str, float]:
    """What a step asks for, by name."""
    asked: dict[str, float] = {STREAM: float(step.stream_bytes), SAMPLER: float(step.sampler_bytes)}
    for product in step.products:
        if product.rows == 1:
            name, amount = READ, product.matrix.nbytes(precision)
        else:
            name, amount = _flops_name(product.rows), 2 * product.rows * product.matrix.elements
        asked[name] = asked.get(name, 0.0) + product.count * amount
    kind = "captured" if step.captured else "eager"
    asked[f"{kind}_layers"], asked[f"{kind}_steps"] = float(step.num_layers), 1.0
    if step.captured:
        asked[READ] = asked.get(READ, 0.0) + step.cache_bytes
    else:
        asked[ATTENTION] = float(step.attention_flops)
    return asked


def _known_s(step: StepWork, tp_size: int, fabric: Fabric) -> float:
    """What the collectives take by themselves; in a captured step without their latency, which is another there."""
    costs = [(each.count, fabric.cost(each.operation, each.nbytes, tp_size, 1)) for each in step.collectives]
    return sum(count * (cost.bandwidth_s if step.captured else cost.seconds) for count, cost in costs)


def _rates(found: dict[str, float], precision: Precision) -> Rates:
    """A cost that the times leave none for is that of what is most like it."""
    if not found.get(READ):
        raise RequestError("the times that were measured leave none for reading memory: measure with less else running")
    read = 1 / found[READ]
    points = [(1, 2 * read / precision.matrix_itemsize)]
    points += sorted((_rows_of(name), 1 / cost) for name, cost in found.items() if _is_flops(name) and cost)
    return Rates(
        read_bytes_per_s=read,
        matrix_flops_per_s={precision.dtype: tuple(points)},
        attention_flops_per_s=1 / found[ATTENTION] if found.get(ATTENTION) else points[-1][1],
        stream_bytes_per_s=1 / found[STREAM] if found.get(STREAM) else read,
        sampler_bytes_per_s=1 / found[SAMPLER] if found.get(SAMPLER) else None,
        captured_layer_s=found.get("captured_layers", 0.0),
        eager_layer_s=found.get("eager_layers", 0.0),
        captured_step_s=found.get("captured_steps", 0.0),
        eager_step_s=found.get("eager_steps", 0.0),
    )


def _with_collectives(rates: Rates, alone: Rates | None) -> Rates:
    if alone is None:
        return rates
    layer_s = min(rates.captured_layer_s, alone.captured_layer_s)
    return replace(rates, captured_layer_s=layer_s, captured_collective_s=(rates.captured_layer_s - layer_s) / 2)


def _flops_name(rows: int) -> str:
    return f"flops {rows}"


def _is_flops(name: str) -> bool:
    return name.startswith("flops ")


def _rows_of(name: str) -> int:
    return int(name.removeprefix("flops "))


def _sum(columns: Sequence[dict[str, float]]) -> dict[str, float]:
    names = {name for column in columns for name in column}
    return {name: sum(column.get(name, 0.0) for column in columns) for name in names}
