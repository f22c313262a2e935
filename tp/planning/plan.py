"""The search over degrees: what fits, how fast it is, and which degree is best for what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from tp.checkpoint.memory import largest
from tp.config import ModelConfig
from tp.defaults import PREFILL_CHUNK
from tp.dtypes import DTYPES
from tp.errors import CapacityError, RequestError
from tp.generation.decode_graphs import CudaGraph, NativeTape, can_be_captured
from tp.layers.layout import shards_without_gradients
from tp.planning.hardware import ANY_DEGREE, Profile
from tp.planning.memory import RankMemory, serving_memory, training_memory
from tp.planning.parameters import RankModel, distinct_ranks, rank_models
from tp.planning.precision import Precision
from tp.planning.step_collectives import Collective
from tp.planning.step_time import StepTime, alike_time, slowest, step_time, total
from tp.planning.work import AlikeSteps, StepWork, decode_work, prefill_steps, training_work

MOST_SEQUENCES = {"cuda": CudaGraph.most_sequences, "cpu": NativeTape.most_sequences}
"""By device, the largest batch whose decode steps may be captured."""


@dataclass(frozen=True)
class Workload:
    """What is to run on what.

    Attributes:
        config, precision: the model and its numbers.
        profile, nodes: the machine, and how many of its nodes there are.
        batch: sequences at once; in training, rows at once.
        context: tokens of each.
        chunk: most prompt tokens of a step.
        sharded: sequence parallelism; None: where `automatic_layout` has it.
        recomputed: activation checkpointing.
    """

    config: ModelConfig
    precision: Precision
    profile: Profile
    nodes: int = 1
    batch: int = 1
    context: int = 4096
    chunk: int = PREFILL_CHUNK
    sharded: bool | None = None
    recomputed: bool = False

    def __post_init__(self) -> None:
        """Checks the context.

        Raises:
            CapacityError: longer than the model was made for.
        """
        if self.context > self.config.longest_context:
            raise CapacityError(
                f"--context {self.context} is more than the {self.config.longest_context} tokens that the model was "
                "made for"
            )

    def nodes_of(self, tp_size: int) -> int:
        """How many nodes so many ranks take.

        Raises:
            ConfigError: more ranks than query heads. RequestError: more than the nodes hold, or not as many on each.
        """
        self.config.check_degree(tp_size)
        nodes = self.profile.nodes_for(tp_size, self.nodes)
        if nodes is None:
            have = f"{self.nodes} node{'s' if self.nodes > 1 else ''} of {self.profile.ranks_per_node}"
            raise RequestError(f"--tp {tp_size} cannot be dealt out evenly over {have} ranks: give more --nodes")
        return nodes

    def shards(self, num_tokens: int, tp_size: int) -> bool:
        """Whether a step of prefill or decode of so many tokens runs sharded."""
        return tp_size > 1 and (shards_without_gradients(num_tokens) if self.sharded is None else self.sharded)

    def shards_training(self, tp_size: int) -> bool:
        """Whether a training step runs sharded."""
        return tp_size > 1 and self.sharded is not False

    def captures(self, tp_size: int) -> bool:
        """Whether decode steps of the batch are captured. On CPUs those of a sharded stream call torch."""
        device = self.profile.device
        captured = self.batch <= MOST_SEQUENCES[device] and not (device == "cpu" and self.shards(self.batch, tp_size))
        return captured and can_be_captured(self.config, DTYPES[self.precision.dtype], device)

    def ranks(self, tp_size: int) -> tuple[RankModel, ...]:
        """Every rank of a group."""
        return rank_models(self.config, self.precision, tp_size)


@dataclass(frozen=True)
class Placement:
    """Memory at one degree.

    Attributes:
        tp_size, nodes: ranks, and the nodes that they are on.
        memory: of each rank.
        available: bytes that each may take.
    """

    tp_size: int
    nodes: int
    memory: tuple[RankMemory, ...]
    available: int

    @property
    def worst(self) -> RankMemory:
        """Of the rank that takes most."""
        return max(self.memory, key=lambda memory: memory.total)

    @property
    def short(self) -> int:
        """Bytes that the worst rank lacks; 0 where everything fits."""
        return max(0, self.worst.total - self.available)

    @property
    def fits(self) -> bool:
        return not self.short


@dataclass(frozen=True)
class ServingPlan:
    """Serving at one degree.

    Attributes:
        placement: what it takes.
        largest_batch, largest_context: that fit, at the workload's context and at its batch.
        prefill: of all prompts of the batch, each as long as the context.
        decode: of a step that gives each sequence its last token.
        decode_collectives: of that step. prefill_collectives: of all steps of the prefill.
        served: the largest batch, but no more than may be captured: `MOST_SEQUENCES`.
        throughput: tokens a second of decode at that batch; 0 where nothing fits.
    """

    placement: Placement
    largest_batch: int
    largest_context: int
    prefill: StepTime
    decode: StepTime
    decode_collectives: tuple[Collective, ...]
    prefill_collectives: tuple[Collective, ...]
    served: int
    throughput: float

    @property
    def tp_size(self) -> int:
        return self.placement.tp_size


@dataclass(frozen=True)
class TrainingPlan:
    """Training at one degree.

    Attributes:
        placement: what it takes in the workload's layout.
        replicated, sharded: what the activations of the worst rank take in either layout.
        largest_batch: rows at once that fit.
        step: forward, backward and update.
        collectives: of that step.
    """

    placement: Placement
    replicated: int
    sharded: int
    largest_batch: int
    step: StepTime
    collectives: tuple[Collective, ...]

    @property
    def tp_size(self) -> int:
        return self.placement.tp_size


def plan_serving(workload: Workload, tp_size: int) -> ServingPlan:
    """One degree.

    Raises:
        ConfigError, RequestError: see `Workload.nodes_of`, and what the profile lacks.
    """
    placement = serving_placement(workload, tp_size)
    most = largest(lambda batch: serving_placement(replace(workload, batch=batch), tp_size).fits, 1 << 20)
    longest = largest(
        lambda context: serving_placement(replace(workload, context=context), tp_size).fits,
        workload.config.longest_context,
    )
    served = min(most, MOST_SEQUENCES[workload.profile.device])
    return ServingPlan(
        placement=placement,
        largest_batch=most,
        largest_context=longest,
        prefill=prefill_time(workload, tp_size),
        decode=decode_time(workload, tp_size),
        decode_collectives=_decode_work(workload, workload.ranks(tp_size)[0]).collectives,
        prefill_collectives=_merged(_prefill_steps(workload, workload.ranks(tp_size)[0])),
        served=served,
        throughput=served / decode_time(replace(workload, batch=served), tp_size).seconds if served else 0.0,
    )


def plan_training(workload: Workload, tp_size: int) -> TrainingPlan:
    """One degree.

    Raises:
        ConfigError, RequestError: see `Workload.nodes_of`, and what the profile lacks.
    """
    layouts = [replace(workload, sharded=sharded) for sharded in (False, True)]
    of_layouts = [training_placement(each, tp_size).worst.activations for each in layouts]
    model = workload.ranks(tp_size)[0]
    return TrainingPlan(
        placement=training_placement(workload, tp_size),
        replicated=of_layouts[0],
        sharded=of_layouts[1],
        largest_batch=largest(lambda batch: training_placement(replace(workload, batch=batch), tp_size).fits, 1 << 16),
        step=training_time(workload, tp_size),
        collectives=_training_work(workload, model).collectives,
    )


def serving_placement(workload: Workload, tp_size: int) -> Placement:
    """Memory of serving at one degree."""
    tokens = min(workload.chunk, workload.batch * workload.context)
    device, runtime = workload.profile.device, workload.profile.runtime_bytes
    memory = tuple(
        serving_memory(
            model,
            rank,
            device,
            runtime,
            batch=workload.batch,
            context=workload.context,
            chunk=workload.chunk,
            sharded=workload.shards(tokens, tp_size),
        )
        for rank, model in enumerate(workload.ranks(tp_size))
    )
    return _placement(workload, tp_size, memory)


def training_placement(workload: Workload, tp_size: int) -> Placement:
    """Memory of training at one degree."""
    device, runtime = workload.profile.device, workload.profile.runtime_bytes
    memory = tuple(
        training_memory(
            model,
            rank,
            device,
            runtime,
            batch=workload.batch,
            context=workload.context,
            sharded=workload.shards_training(tp_size),
            recomputed=workload.recomputed,
        )
        for rank, model in enumerate(workload.ranks(tp_size))
    )
    return _placement(workload, tp_size, memory)


def decode_time(workload: Workload, tp_size: int) -> StepTime:
    """Of a step that gives each sequence its last token, on the slowest rank."""
    nodes = workload.nodes_of(tp_size)
    return slowest(
        step_time(_decode_work(workload, model), workload.precision, workload.profile, tp_size, nodes)
        for model in distinct_ranks(workload.config, workload.precision, tp_size)
    )


def prefill_time(workload: Workload, tp_size: int) -> StepTime:
    """Of all steps until every sequence has its first token, on the slowest rank."""
    nodes = workload.nodes_of(tp_size)
    return slowest(
        total([alike_time(steps, workload.precision, workload.profile, tp_size, nodes) for steps in of_rank])
        for model in distinct_ranks(workload.config, workload.precision, tp_size)
        for of_rank in [_prefill_steps(workload, model)]
    )


def training_time(workload: Workload, tp_size: int) -> StepTime:
    """Of a training step, on the slowest rank."""
    nodes = workload.nodes_of(tp_size)
    return slowest(
        step_time(_training_work(workload, model), workload.precision, workload.profile, tp_size, nodes)
        for model in distinct_ranks(workload.config, workload.precision, tp_size)
    )


def fastest(plans: Sequence[ServingPlan]) -> ServingPlan | None:
    """The best degree for latency: the shortest decode step of those that fit."""
    return min((plan for plan in plans if plan.placement.fits), key=lambda plan: plan.decode.seconds, default=None)


def most_productive(plans: Sequence[ServingPlan]) -> ServingPlan | None:
    """The best degree for throughput: most tokens a second and rank at the largest batch, of those that fit."""
    return max(
        (plan for plan in plans if plan.placement.fits and plan.throughput),
        key=lambda plan: plan.throughput / plan.tp_size,
        default=None,
    )


def speed_up(workload: Workload, plan: ServingPlan) -> float:
    """How many times as fast its decode is as that of `first_degree` ranks, times those: t where nothing is lost."""
    first = first_degree(workload)
    return first * decode_time(workload, first).seconds / plan.decode.seconds


def training_speed_up(workload: Workload, plan: TrainingPlan) -> float:
    """The same of a training step."""
    first = first_degree(workload)
    return first * training_time(workload, first).seconds / plan.step.seconds


def first_degree(workload: Workload) -> int:
    """What speed-ups are relative to: one rank, whether or not the model fits, or the least that was measured."""
    rates = workload.profile.rates
    return 1 if ANY_DEGREE in rates else min(rates)


def _placement(workload: Workload, tp_size: int, memory: tuple[RankMemory, ...]) -> Placement:
    nodes = workload.nodes_of(tp_size)
    return Placement(tp_size, nodes, memory, workload.profile.memory_of_a_rank(tp_size, nodes))


def _decode_work(workload: Workload, model: RankModel) -> StepWork:
    sharded, captured = workload.shards(workload.batch, model.tp_size), workload.captures(model.tp_size)
    return decode_work(model, workload.batch, workload.context, captured=captured, sharded=sharded)


def _prefill_steps(workload: Workload, model: RankModel) -> list[AlikeSteps]:
    shards = partial(workload.shards, tp_size=model.tp_size)
    return prefill_steps(model, workload.batch, workload.context, workload.chunk, shards)


def _merged(steps: Sequence[AlikeSteps]) -> tuple[Collective, ...]:
    """Of all steps, those of one kind and size counted together."""
    counts: dict[tuple[str, int], int] = {}
    for alike in steps:
        for each in alike.work.collectives:
            key = each.operation, each.nbytes
            counts[key] = counts.get(key, 0) + each.count * len(alike.attention)
    return tuple(Collective(operation, nbytes, count) for (operation, nbytes), count in counts.items())


def _training_work(workload: Workload, model: RankModel) -> StepWork:
    sharded = workload.shards_training(model.tp_size)
    return training_work(model, workload.batch, workload.context, sharded=sharded, recomputed=workload.recomputed)
