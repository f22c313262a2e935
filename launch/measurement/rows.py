"""A contestant's results in one case, worked out from what was measured in its turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch.measurement.cases import Case
from launch.measurement.contestants import Contestant
from launch.measurement.model_facts import ModelFacts
from launch.measurement.peers import own
from launch.measurement.requests import DecodeAnswer
from launch.measurement.spread import Spread, paired_ratio


@dataclass(frozen=True)
class Served:
    """One turn of a contestant.

    Attributes:
        read_bytes_per_s: mean memory read bandwidth directly before and after, of as many processes and threads.
    """

    answer: DecodeAnswer
    read_bytes_per_s: float


@dataclass(frozen=True)
class Row:
    """One contestant in one case.

    Attributes:
        contestant, system, processes, threads: who; threads are those of each process.
        phase, batch, prompt_tokens, new_tokens: of the case.
        milliseconds: prefill: to the first token; decode: for one more token of every sequence.
        tokens_per_s: prefill: prompt tokens; decode: new tokens; of all sequences.
        own_speed: by contestant of this project, how many times as fast it is, paired by round.
        same_ids: by contestant of this project, the share of new ids that are equal up to the first that is not.
        read_gb_per_s: memory read bandwidth of as many processes and threads, GB/s.
        weights_gb_per_s: decode: weights read a second, GB/s; None for prefill.
        read_share: decode: weights read a second by the read bandwidth beside it; None for prefill.
    """

    contestant: str
    system: str
    processes: int
    threads: int
    phase: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    milliseconds: Spread
    tokens_per_s: Spread
    own_speed: Mapping[str, float]
    same_ids: Mapping[str, float]
    read_gb_per_s: Spread
    weights_gb_per_s: Spread | None
    read_share: Spread | None


def row(
    case: Case,
    contestant: Contestant,
    served: Mapping[str, Sequence[Served]],
    facts: ModelFacts,
) -> Row:
    """The row of a contestant.

    Args:
        served: of all contestants that lasted, by name, one a round.
    """
    answers = {name: [turn.answer for turn in turns] for name, turns in served.items()}
    reads = [turn.read_bytes_per_s for turn in served[contestant.name]]
    mine = answers[contestant.name]
    times = milliseconds(case, mine)
    ours = {name: others for name, others in answers.items() if name.startswith(f"{own.NAME} ")}
    rates = [1e3 * facts.step_bytes / time for time in times] if case.phase == "decode" else []
    shares = [rate / read for rate, read in zip(rates, reads, strict=False)]
    tokens = case.batch * (1 if case.phase == "decode" else case.prompt_tokens)
    return Row(
        contestant=contestant.name,
        system=contestant.system,
        processes=contestant.processes,
        threads=contestant.threads,
        phase=case.phase,
        batch=case.batch,
        prompt_tokens=case.prompt_tokens,
        new_tokens=case.new_tokens,
        milliseconds=Spread.of(times),
        tokens_per_s=Spread.of(1e3 * tokens / time for time in times),
        own_speed={name: paired_ratio(times, milliseconds(case, others)) for name, others in ours.items()},
        same_ids={name: same_ids(mine[0], others[0]) for name, others in ours.items()},
        read_gb_per_s=Spread.of(read / 1e9 for read in reads),
        weights_gb_per_s=Spread.of(rate / 1e9 for rate in rates) if rates else None,
        read_share=Spread.of(shares) if shares else None,
    )


def milliseconds(case: Case, answers: Sequence[DecodeAnswer]) -> list[float]:
    """The time that the case is about, of each answer."""
    return [answer.ttft_ms if case.phase == "prefill" else answer.tpot_ms for answer in answers]


def same_ids(one: DecodeAnswer, other: DecodeAnswer) -> float:
    """The share of new ids, 0 to 1, that are equal up to the first that is not, over all sequences."""
    equal = total = 0
    for ids, other_ids in zip(one.new_ids, other.new_ids, strict=True):
        pairs = list(zip(ids, other_ids, strict=True))
        first_other = next((at for at, (left, right) in enumerate(pairs) if left != right), len(pairs))
        equal, total = equal + first_other, total + len(pairs)
    return equal / total
