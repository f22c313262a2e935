"""How long a step takes: what it asks of a rank, at the rates of a machine.

    products       Σ max(bytes / read rate, FLOPs / matrix rate)      a roofline for each matrix
    attention      max(cache bytes / cache rate, FLOPs / attention rate)
    stream         bytes of what is no product / stream rate, and of logits / the sampler's
    layers, step   a fixed cost for each pass through a layer, and for the step: launches, gaps, Python
    collectives    their latency, and what their bytes add
    optimizer      its bytes / stream rate

The parts follow one another: nothing is taken to overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace

from tp.planning.collectives import Cost
from tp.planning.hardware import Profile, Rates
from tp.planning.precision import Precision
from tp.planning.work import AlikeSteps, Product, StepWork


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, or of several, by part."""

    products_s: float = 0.0
    attention_s: float = 0.0
    stream_s: float = 0.0
    layers_s: float = 0.0
    step_s: float = 0.0
    latency_s: float = 0.0
    bandwidth_s: float = 0.0
    optimizer_s: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self._parts())

    def __add__(self, other: StepTime) -> StepTime:
        return StepTime(*map(sum, zip(self._parts(), other._parts(), strict=True)))

    def times(self, count: int) -> StepTime:
        """Of so many of them."""
        return StepTime(*(count * part for part in self._parts()))

    def _parts(self) -> tuple[float, ...]:
        return astuple(self)


def step_time(work: StepWork, precision: Precision, profile: Profile, tp_size: int, nodes: int) -> StepTime:
    """Of one rank's step; all ranks take part in its collectives.

    Raises:
        RequestError: the profile lacks a rate or a cost.
    """
    rates = profile.rates_of(tp_size)
    costs = [
        (each.count, profile.fabric.cost(each.operation, each.nbytes, tp_size, nodes)) for each in work.collectives
    ]
    layer_s = rates.captured_layer_s if work.captured else rates.eager_layer_s
    return StepTime(
        products_s=sum(_product_s(product, precision, rates) for product in work.products),
        attention_s=_attention_s(work.cache_bytes, work.attention_flops, rates),
        stream_s=_stream_s(work, rates),
        layers_s=work.num_layers * layer_s,
        step_s=rates.captured_step_s if work.captured else rates.eager_step_s,
        latency_s=sum(count * _latency_s(cost, work, rates) for count, cost in costs),
        bandwidth_s=sum(count * cost.bandwidth_s for count, cost in costs),
        optimizer_s=work.optimizer_bytes / rates.stream_bytes_per_s,
    )


def alike_time(steps: AlikeSteps, precision: Precision, profile: Profile, tp_size: int, nodes: int) -> StepTime:
    """Of all of them; see `step_time`."""
    rates = profile.rates_of(tp_size)
    apart = step_time(steps.work, precision, profile, tp_size, nodes).times(len(steps.attention))
    return replace(apart, attention_s=sum(_attention_s(nbytes, flops, rates) for flops, nbytes in steps.attention))


def slowest(times: Iterable[StepTime]) -> StepTime:
    """Of the rank that the others wait for."""
    return max(times, key=lambda time: time.seconds)


def total(times: Sequence[StepTime]) -> StepTime:
    """Of steps that follow one another."""
    return sum(times, StepTime())


def _stream_s(work: StepWork, rates: Rates) -> float:
    sampling = work.sampler_bytes / (rates.sampler_bytes_per_s or rates.stream_bytes_per_s)
    return work.stream_bytes / rates.stream_bytes_per_s + sampling


def _latency_s(cost: Cost, work: StepWork, rates: Rates) -> float:
    apart = rates.captured_collective_s
    return cost.latency_s if apart is None or not work.captured else apart


def _attention_s(cache_bytes: int, flops: int, rates: Rates) -> float:
    reading = cache_bytes / (rates.cache_bytes_per_s or rates.read_bytes_per_s)
    return max(reading, flops / rates.attention_flops_per_s)


def _product_s(product: Product, precision: Precision, rates: Rates) -> float:
    """Products with many rows are limited by the multiplication, those with few by reading the weights."""
    reading = product.matrix.nbytes(precision) / rates.read_bytes_per_s
    multiplying = 2 * product.rows * product.matrix.elements / rates.flops_per_s(precision.dtype, product.rows)
    return product.count * max(reading, multiplying)
