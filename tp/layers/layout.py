"""How the residual stream lies over the ranks of a group; chosen once a forward, equally on all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from tp.parallel.group import TensorParallelGroup
from tp.parallel.mappings import copy_to_tensor_parallel_region, reduce_from_tensor_parallel_region


@dataclass(frozen=True)
class Layout(ABC):
    """A layout of [N, D] states over the group.

    Attributes:
        group: the ranks.
        num_tokens: N, the tokens of this step, over all ranks.
    """

    group: TensorParallelGroup
    num_tokens: int

    @abstractmethod
    def combine(self, partial_sum: Tensor) -> Tensor:
        """Every rank's partial sum [N, D] → this layout's share of their sum."""

    @abstractmethod
    def whole(self, local: Tensor) -> Tensor:
        """This layout's share → [N, D] for column-parallel linears, whose input gradients are partial sums."""

    @abstractmethod
    def replicated(self, local: Tensor) -> Tensor:
        """This layout's share → [N, D] for a consumer that computes the same on every rank."""

    @abstractmethod
    def select(self, local: Tensor, rows: Tensor) -> Tensor:
        """This layout's share → the given rows of the stream, [len(rows), D], on every rank."""


@dataclass(frozen=True)
class Replicate(Layout):
    """Every rank holds the whole stream [N, D]; a write is an all-reduce."""

    def combine(self, partial_sum: Tensor) -> Tensor:
        return reduce_from_tensor_parallel_region(partial_sum, self.group)

    def whole(self, local: Tensor) -> Tensor:
        return copy_to_tensor_parallel_region(local, self.group)

    def replicated(self, local: Tensor) -> Tensor:
        return local

    def select(self, local: Tensor, rows: Tensor) -> Tensor:
        return local.index_select(0, rows)
