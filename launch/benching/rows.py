"""What is worked out of measurements: rows. Every ratio is one of two values of the same round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launch.benching.sweep import OWN, Case, Form, growth, work_of
from launch.measurement.engine.requests import TrainingAnswer
from launch.measurement.requests import Communication, DecodeAnswer
from launch.measurement.spread import Spread
from tp.json_objects import typed


@dataclass(frozen=True)
class Sample:
    """One measurement of one form: a prefill, a decode step, or an optimiser step.

    Attributes:
        milliseconds: on rank 0. Of a decode step the mean over the steps of a request.
        communication: of as many steps as `steps`; None where there is none.
        steps: what `communication` is of.
    """

    milliseconds: float
    communication: Communication | None
    steps: int = 1

    @classmethod
    def of(cls, case: Case, answer: DecodeAnswer | TrainingAnswer) -> Sample:
        """What the case is about, of an answer to its request."""
        if isinstance(answer, TrainingAnswer):
            return cls(answer.milliseconds, answer.communication)
        if case.phase == "prefill":
            return cls(answer.ttft_ms, answer.prefill_communication)
        return cls(answer.tpot_ms, answer.decode_communication, case.new_tokens - 1)

    @property
    def communication_ms(self) -> tuple[float, ...]:
        """Inside collectives in one step, on each rank."""
        assert self.communication is not None
        return tuple(1e3 * seconds / self.steps for seconds in self.communication.seconds)


@dataclass(frozen=True)
class Collectives:
    """The collectives of one step; those that belong to no layer are spread over all.

    Attributes:
        milliseconds: inside them on rank 0, whose time is the step's, waiting for peers included.
        least_milliseconds: on the rank that spent least in them: nearest to what they take when nobody waits.
        share: of the step, on rank 0.
        calls, bytes: of one rank.
        calls_a_layer, bytes_a_layer: those, by the number of layers.
    """

    milliseconds: Spread
    least_milliseconds: Spread
    share: Spread
    calls: float
    bytes: float
    calls_a_layer: float
    bytes_a_layer: float


@dataclass(frozen=True)
class Limit:
    """What no engine can be faster than on as many processes and threads.

    Attributes:
        of: "memory" (decode) or "matrix products" (prefill, training).
        rate: measured in the same rounds: bytes, or FLOP, a second.
        share: of it that the step reaches.
    """

    of: str
    rate: Spread
    share: Spread


@dataclass(frozen=True)
class Row:
    """One form in one case.

    Attributes:
        batch, tokens: of this form's work.
        milliseconds: of a prefill, of a decode step, or of an optimiser step.
        tokens_per_s: of all sequences: prompt tokens, new tokens, or tokens trained on.
        speed_up: work a second by that of this project at t = 1; None where t = 1 failed.
        efficiency: the speed-up by how many times as many cores, or GPUs, it has; None for peers.
        collectives: None where there are no ranks, or where the system does not tell.
        limit: None where it could not be measured.
    """

    case: Case
    form: Form
    batch: int
    tokens: int
    milliseconds: Spread
    tokens_per_s: Spread
    speed_up: Spread | None
    efficiency: Spread | None
    collectives: Collectives | None
    limit: Limit | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Row:
        """From what `to_json` gave.

        Raises:
            ValueError: it came from something else.
        """
        return typed(cls, fields, "a row")


@dataclass(frozen=True)
class Measured:
    """What came out of a case's rounds.

    Attributes:
        samples: of each form that lasted, one a round.
        limit: what is measured as the limit.
        rates: of that, by degree, one a round; absent where it could not be measured.
    """

    samples: Mapping[Form, Sequence[Sample]]
    limit: str
    rates: Mapping[int, Sequence[float]]


def rows_of(case: Case, measured: Measured, amounts: Mapping[Form, float], num_layers: int) -> list[Row]:
    """A row for each form that lasted.

    Args:
        amounts: of each form: bytes that a step must read, or FLOP that it must compute, as the limit is of.
    """
    baseline = next((form for form in measured.samples if form.is_baseline), None)
    return [_row(case, measured, form, baseline, amounts[form], num_layers) for form in measured.samples]


def _row(case: Case, measured: Measured, form: Form, baseline: Form | None, amount: float, num_layers: int) -> Row:
    samples = measured.samples[form]
    times = [sample.milliseconds for sample in samples]
    batch, tokens = work_of(case, form)
    step_tokens = batch * (1 if case.phase == "decode" else tokens)
    speed_ups, efficiencies = [], []
    if baseline is not None:
        pairs = zip(measured.samples[baseline], times, strict=True)
        speed_ups = [growth(case, form) * one.milliseconds / time for one, time in pairs]
        if form.system == OWN:
            efficiencies = [speed_up * baseline.units / form.units for speed_up in speed_ups]
    return Row(
        case=case,
        form=form,
        batch=batch,
        tokens=tokens,
        milliseconds=Spread.of(times),
        tokens_per_s=Spread.of(1e3 * step_tokens / time for time in times),
        speed_up=_spread_of(speed_ups),
        efficiency=_spread_of(efficiencies),
        collectives=_collectives(samples, num_layers),
        limit=_limit(measured.limit, measured.rates.get(form.tp_size), amount, times),
    )


def _collectives(samples: Sequence[Sample], num_layers: int) -> Collectives | None:
    first = samples[0].communication
    if first is None:
        return None
    calls, nbytes = first.calls / samples[0].steps, first.bytes / samples[0].steps
    return Collectives(
        milliseconds=Spread.of(sample.communication_ms[0] for sample in samples),
        least_milliseconds=Spread.of(min(sample.communication_ms) for sample in samples),
        share=Spread.of(sample.communication_ms[0] / sample.milliseconds for sample in samples),
        calls=calls,
        bytes=nbytes,
        calls_a_layer=calls / num_layers,
        bytes_a_layer=nbytes / num_layers,
    )


def _limit(of: str, rates: Sequence[float] | None, amount: float, times: Sequence[float]) -> Limit | None:
    if not rates:
        return None
    shares = [1e3 * amount / time / rate for time, rate in zip(times, rates, strict=True)]
    return Limit(of, Spread.of(rates), Spread.of(shares))


def _spread_of(values: Sequence[float]) -> Spread | None:
    return Spread.of(values) if values else None
