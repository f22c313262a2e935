"""From measured times of a few small models to the rates of a rank.

Every time is a sum of what the step asks for, each at a rate that is not known yet: bytes of weights and of cache that
are read, FLOPs of products with so many rows, FLOPs of attention, bytes of what is no product, logits that tokens are
chosen from, layers and steps. The rates are those that explain all times of a degree best, see `fit_nonnegative`; what
they leave no time for is counted with what it is most like: sampling with the stream, the stream and the cache with
reading, attention with products of most rows.
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


@dataclass(frozen=True, order=True)
class Column:
    """What a step asks for, and what has a cost of its own.

    Attributes:
        rows: of FLOPs of products, the rows that these have.
    """

    kind: str
    rows: int = 0


READ, CACHE, ATTENTION = Column("read"), Column("cache"), Column("attention")
STREAM, SAMPLER = Column("stream"), Column("sampler")
CAPTURED_LAYERS, CAPTURED_STEPS = Column("captured layers"), Column("captured steps")
EAGER_LAYERS, EAGER_STEPS = Column("eager layers"), Column("eager steps")
FLOPS = "flops"

Amounts = dict[Column, float]
"""How much of each a time is made of."""


@dataclass(frozen=True)
class Observation:
    """A measured time.

    Attributes:
        config: of the model.
        phase: prefill is the time to the first token of all sequences; decode is that of one step.
        batch: sequences.
        context: tokens of each; in decode, half way through what was timed.
        seconds: of the middle of its measurements.
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
    measured: list[Amounts] = []
    seconds = []
    for each in observations:
        steps = _steps(each, precision, tp_size, chunk)
        measured.append(_sum([_amounts(step, precision) for step in steps]))
        seconds.append(max(each.seconds - sum(_known_s(step, tp_size, fabric) for step in steps), each.seconds / 10))
    found = _costs(measured, seconds)
    for column, like in (SAMPLER, STREAM), (STREAM, READ), (CACHE, READ), (ATTENTION, _most_rows(measured)):
        if like and not found.get(column):
            measured = [_counted_as(amounts, column, like) for amounts in measured]
            found = _costs(measured, seconds)
    rates = _rates(found, precision)
    return rates if tp_size == 1 else _with_collectives(rates, alone)


def _costs(measured: Sequence[Amounts], seconds: Sequence[float]) -> Amounts:
    """Seconds for one of each."""
    columns = sorted({column for amounts in measured for column in amounts})
    rows = [[amounts.get(column, 0.0) for column in columns] for amounts in measured]
    return dict(zip(columns, fit_nonnegative(rows, seconds), strict=True))


def _most_rows(measured: Sequence[Amounts]) -> Column | None:
    """Products with most rows; None where there are none."""
    return max((column for amounts in measured for column in amounts if column.kind == FLOPS), default=None)


def _counted_as(amounts: Amounts, column: Column, like: Column) -> Amounts:
    return {**amounts, column: 0.0, like: amounts.get(like, 0.0) + amounts.get(column, 0.0)}


def _steps(observation: Observation, precision: Precision, tp_size: int, chunk: int) -> list[StepWork]:
    """On the rank that has most to do."""
    model = max(distinct_ranks(observation.config, precision, tp_size), key=_busy)
    if observation.phase == "decode":
        return [decode_work(model, observation.batch, observation.context)]
    return prefill_work(model, observation.batch, observation.context, chunk)


def _busy(model: RankModel) -> int:
    return model.parameters.elements


def _amounts(step: StepWork, precision: Precision) -> Amounts:
    """What a step asks for."""
    asked = {STREAM: float(step.stream_bytes), SAMPLER: float(step.sampler_bytes)}
    for product in step.products:
        if product.rows == 1:
            column, amount = READ, product.matrix.nbytes(precision)
        else:
            column, amount = Column(FLOPS, product.rows), 2 * product.rows * product.matrix.elements
        asked[column] = asked.get(column, 0.0) + product.count * amount
    if step.captured:
        return {**asked, CACHE: float(step.cache_bytes), CAPTURED_LAYERS: float(step.num_layers), CAPTURED_STEPS: 1.0}
    layers = {EAGER_LAYERS: float(step.num_layers), EAGER_STEPS: 1.0}
    return {**asked, **layers, ATTENTION: float(step.attention_flops)}


def _known_s(step: StepWork, tp_size: int, fabric: Fabric) -> float:
    """What the collectives take by themselves; in a captured step without their latency, which is another there."""
    costs = [(each.count, fabric.cost(each.operation, each.nbytes, tp_size, 1)) for each in step.collectives]
    return sum(count * (cost.bandwidth_s if step.captured else cost.seconds) for count, cost in costs)


def _rates(found: Amounts, precision: Precision) -> Rates:
    """A cost that the times leave none for is that of what is most like it."""
    if not found.get(READ):
        raise RequestError("the times that were measured leave none for reading memory: measure with less else running")
    read = 1 / found[READ]
    points = [(1, 2 * read / precision.matrix_itemsize)]
    points += sorted((column.rows, 1 / cost) for column, cost in found.items() if column.kind == FLOPS and cost)
    return Rates(
        read_bytes_per_s=read,
        matrix_flops_per_s={precision.dtype: tuple(points)},
        attention_flops_per_s=1 / found[ATTENTION] if found.get(ATTENTION) else points[-1][1],
        stream_bytes_per_s=1 / found[STREAM] if found.get(STREAM) else read,
        sampler_bytes_per_s=1 / found[SAMPLER] if found.get(SAMPLER) else None,
        cache_bytes_per_s=1 / found[CACHE] if found.get(CACHE) else None,
        captured_layer_s=found.get(CAPTURED_LAYERS, 0.0),
        eager_layer_s=found.get(EAGER_LAYERS, 0.0),
        captured_step_s=found.get(CAPTURED_STEPS, 0.0),
        eager_step_s=found.get(EAGER_STEPS, 0.0),
    )


def _with_collectives(rates: Rates, alone: Rates | None) -> Rates:
    """The latency of collectives apart from the rest of a captured layer; in it, where `alone` does not tell."""
    layer_s = rates.captured_layer_s if alone is None else min(rates.captured_layer_s, alone.captured_layer_s)
    return replace(rates, captured_layer_s=layer_s, captured_collective_s=(rates.captured_layer_s - layer_s) / 2)


def _sum(steps: Sequence[Amounts]) -> Amounts:
    columns = {column for amounts in steps for column in amounts}
    return {column: sum(amounts.get(column, 0.0) for amounts in steps) for column in columns}
