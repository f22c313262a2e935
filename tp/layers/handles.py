"""What passes between the residual stream and the linears: typed, so that a shard cannot be taken for a whole."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from tp.errors import LayoutError
from tp.kernels.int8_weight import Int8Weight
from tp.kernels.linear import linear
from tp.layers.layout import Layout, Replicate
from tp.parallel.group import TensorParallelGroup
from tp.parallel.mappings import copy_to_tensor_parallel_region, reduce_from_tensor_parallel_region


@dataclass(frozen=True)
class Partial:
    """One rank's addend of a sum over the group: what a row-parallel linear or the embedding leaves.

    Attributes:
        value: [..., D]; the sum over the ranks of the group is the complete value.
        group: the ranks whose values add up.
        bias: [D], whole on every rank, added once after the sum.
    """

    value: Tensor
    group: TensorParallelGroup
    bias: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return len(self.value)

    def written_in(self, layout: Layout) -> Partial | Combined:
        """What a stream of that layout keeps of it until the next read."""
        return self

    def reduce(self) -> Tensor:
        """The complete value on every rank: all-reduce, then the bias, once."""
        return self.plus_bias(reduce_from_tensor_parallel_region(self.value, self.group))

    def plus_bias(self, combined: Tensor) -> Tensor:
        """`combined` (a sum over the ranks, in any layout) with the bias added."""
        return combined if self.bias is None else combined + self.bias

    def select(self, rows: Tensor) -> Partial:
        """The same sum for some rows only."""
        return replace(self, value=self.value.index_select(0, rows))


@dataclass(frozen=True)
class LinearPartial:
    """A `Partial` whose value x_i W_iᵀ is not multiplied yet, so that it may overlap with its transfer.

    Attributes:
        x: [..., this rank's input features].
        weight: [D, this rank's input features].
        group, bias: as of a `Partial`.
    """

    x: Tensor
    weight: Tensor | Int8Weight
    group: TensorParallelGroup
    bias: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return len(self.x)

    def multiplied(self) -> Partial:
        """The partial sum itself."""
        return Partial(linear(self.x, self.weight), self.group, self.bias)

    def written_in(self, layout: Layout) -> Partial | Combined:
        """Combined at once where the layout can overlap the multiplication with the transfer, else the partial sum."""
        combined = None if isinstance(self.weight, Int8Weight) else layout.combine_linear(self.x, self.weight)
        if combined is None:
            return self.multiplied()
        return Combined(combined if self.bias is None else combined + self.bias)

    def reduce(self) -> Tensor:
        """The complete value on every rank: all-reduce, then the bias, once."""
        return self.multiplied().reduce()

    def select(self, rows: Tensor) -> LinearPartial:
        """The same sum for some rows only."""
        return replace(self, x=self.x.index_select(0, rows))


@dataclass(frozen=True)
class Combined:
    """A complete write, bias included, in the layout of its stream."""

    value: Tensor


@dataclass(frozen=True)
class Normed:
    """What a sublayer reads from the stream: the norm's output in the stream's layout.

    The gather, where the layout needs one, happens when a consumer asks.
    """

    local: Tensor
    layout: Layout

    def whole(self) -> Tensor:
        """[N, D] for column-parallel linears (backward: each rank's gradient is a partial sum)."""
        return self.layout.whole(self.local)

    def replicated(self) -> Tensor:
        """[N, D] for a consumer that computes the same on every rank."""
        return self.layout.replicated(self.local)

    def select(self, rows: Tensor) -> Normed:
        """Some rows only, whole on every rank.

        Args:
            rows: [B] int64, token indices of the step, equal on all ranks.
        """
        return Normed(self.layout.select(self.local, rows), Replicate(self.layout.group, len(rows)))


def column_linear(
    x: Tensor | Normed, weight: Tensor | Int8Weight, bias: Tensor | None, group: TensorParallelGroup
) -> Tensor:
    """x Wᵀ + b of a column-parallel linear; errors as `column_parallel_input`."""
    if isinstance(x, Normed):
        return x.layout.column_linear(x.local, weight, bias)
    return linear(column_parallel_input(x, group), weight, bias)


def column_parallel_input(x: Tensor | Normed, group: TensorParallelGroup) -> Tensor:
    """The whole input of a column-parallel linear: from the stream, or a replicated tensor of the user's own.

    Raises:
        LayoutError: `x` is a partial sum that nobody has combined, or anything else.
    """
    if isinstance(x, Normed):
        return x.whole()
    if isinstance(x, Tensor):
        return copy_to_tensor_parallel_region(x, group)
    raise LayoutError(f"a column-parallel linear takes a Tensor or a Normed, not a {type(x).__name__}"
                      + (": call .reduce() first" if isinstance(x, (Partial, LinearPartial)) else ""))  # fmt: skip


def row_parallel_input(x: object) -> Tensor:
    """This rank's input features of a row-parallel linear: what a column-parallel one gave.

    Raises:
        LayoutError: `x` is a handle of the stream, or a partial sum.
    """
    if isinstance(x, Tensor):
        return x
    raise LayoutError(f"a row-parallel linear takes the Tensor of a column-parallel one, not a {type(x).__name__}")
