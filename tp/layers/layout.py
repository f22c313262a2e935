"""How the residual stream lies over the ranks of a group; chosen once a forward, equally on all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tp.kernels.int8_weight import Int8Weight
from tp.kernels.linear import linear
from tp.kernels.overlapped_linear import gathered_linear, overlaps, scattered_linear
from tp.kernels.reduce_add_rms_norm import reduce_add_rms_norm, reduce_scatter_add_rms_norm
from tp.parallel.group import TensorParallelGroup
from tp.parallel.mappings import (
    copy_to_tensor_parallel_region,
    gather_from_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from tp.parallel.partition import chunk_ranges


@dataclass(frozen=True)
class Layout(ABC):
    """A layout of [N, D] states over the group.

    Attributes:
        group: the ranks.
        num_tokens: N, the tokens of this step, over all ranks.
    """

    group: TensorParallelGroup
    num_tokens: int

    @property
    @abstractmethod
    def sharded(self) -> bool:
        """Whether ranks hold different tokens, so that gradients of what is replicated are partial sums."""

    @abstractmethod
    def combine(self, partial_sum: Tensor) -> Tensor:
        """Every rank's partial sum [N, D] → this layout's share of their sum."""

    def combine_linear(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """`combine(x Wᵀ)` whose matmul and transfer overlap; None where they cannot."""
        return None

    @abstractmethod
    def combine_add_norm(
        self, partial_sum: Tensor, bias: Tensor | None, base: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """x = base + (`combine(partial_sum)` + bias) and RMSNorm(x) · weight, as one operation, without gradients."""

    @abstractmethod
    def whole(self, local: Tensor) -> Tensor:
        """This layout's share → [N, D] for column-parallel linears, whose input gradients are partial sums."""

    @abstractmethod
    def column_linear(self, local: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None) -> Tensor:
        """`whole(local)` · Wᵀ + b, where the layout may join its gather to the matmul."""

    @abstractmethod
    def replicated(self, local: Tensor) -> Tensor:
        """This layout's share → [N, D] for a consumer that computes the same on every rank."""

    @abstractmethod
    def select(self, local: Tensor, rows: Tensor) -> Tensor:
        """This layout's share → the given rows of the stream, [len(rows), D], on every rank."""


@dataclass(frozen=True)
class Replicate(Layout):
    """Every rank holds the whole stream [N, D]; a write is an all-reduce."""

    @property
    def sharded(self) -> bool:
        return False

    def combine(self, partial_sum: Tensor) -> Tensor:
        return reduce_from_tensor_parallel_region(partial_sum, self.group)

    def combine_add_norm(
        self, partial_sum: Tensor, bias: Tensor | None, base: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return reduce_add_rms_norm(self.group.communicator, partial_sum, bias, base, weight, eps)

    def whole(self, local: Tensor) -> Tensor:
        return copy_to_tensor_parallel_region(local, self.group)

    def column_linear(self, local: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None) -> Tensor:
        return linear(self.whole(local), weight, bias)

    def replicated(self, local: Tensor) -> Tensor:
        return local

    def select(self, local: Tensor, rows: Tensor) -> Tensor:
        return local.index_select(0, rows)


@dataclass(frozen=True)
class ShardTokens(Layout):
    """Sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198): rank r owns tokens [r·⌈N/t⌉, (r+1)·⌈N/t⌉).

    A write is a reduce-scatter, so that the add and the norm run on this rank's tokens only; a column-parallel
    linear gathers what the norm gives. Real tokens only: late ranks may own fewer, or none, and enter every
    collective all the same.
    """

    @property
    def sizes(self) -> list[int]:
        """Tokens of every rank."""
        return [len(tokens) for tokens in chunk_ranges(self.num_tokens, self.group.size)]

    @property
    def tokens(self) -> range:
        """This rank's tokens."""
        return chunk_ranges(self.num_tokens, self.group.size)[self.group.rank]

    @property
    def sharded(self) -> bool:
        return self.group.size > 1

    def combine(self, partial_sum: Tensor) -> Tensor:
        return reduce_scatter_to_sequence_parallel_region(partial_sum, self.group, self.sizes)

    def combine_linear(self, x: Tensor, weight: Tensor) -> Tensor | None:
        if not overlaps(self.group.communicator, x, self.sizes):
            return None
        return scattered_linear(x, weight, self.group, self.sizes)

    def combine_add_norm(
        self, partial_sum: Tensor, bias: Tensor | None, base: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        communicator = self.group.communicator
        return reduce_scatter_add_rms_norm(communicator, partial_sum, bias, base, weight, eps, self.sizes)

    def whole(self, local: Tensor) -> Tensor:
        return gather_from_sequence_parallel_region(local, self.group, self.sizes)

    def column_linear(self, local: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None) -> Tensor:
        if isinstance(weight, Int8Weight):
            return linear(self.whole(local), weight, bias)
        if torch.is_grad_enabled() or overlaps(self.group.communicator, local, self.sizes):
            return gathered_linear(local, weight, bias, self.group, self.sizes)
        return linear(self.whole(local), weight, bias)

    def replicated(self, local: Tensor) -> Tensor:
        return gather_from_region(local, self.group, self.sizes)

    def select(self, local: Tensor, rows: Tensor) -> Tensor:
        own = rows - self.tokens.start
        owned = (own >= 0) & (own < len(self.tokens))
        if not len(self.tokens):  # nothing to index, but the graph and the collective are entered
            selected = local.sum(0, keepdim=True).expand(len(rows), -1)
        else:
            selected = local.index_select(0, own.where(owned, 0))
        return reduce_from_tensor_parallel_region(selected.where(owned.unsqueeze(-1), 0), self.group)


LayoutRule = Callable[[TensorParallelGroup, int], Layout]
"""Chooses the layout of a step from the group and N alone, so that all ranks choose alike."""

SHARDED_PREFILL_TOKENS = 512
"""From this many tokens on, `automatic_layout` shards a step without gradients."""


def automatic_layout(group: TensorParallelGroup, num_tokens: int) -> Layout:
    """Shards tokens in training and in long prefill, where it divides activations by t; else replicates.

    In decode latency rules: one all-reduce is cheaper than a reduce-scatter and an all-gather.
    """
    if torch.is_grad_enabled() or shards_without_gradients(num_tokens):
        return ShardTokens(group, num_tokens)
    return Replicate(group, num_tokens)


def shards_without_gradients(num_tokens: int) -> bool:
    """Whether `automatic_layout` shards a step of prefill or decode of so many tokens."""
    return num_tokens >= SHARDED_PREFILL_TOKENS
