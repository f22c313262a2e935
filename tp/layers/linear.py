"""Column- and row-parallel linears (Shoeybi et al. 2019, arXiv:1909.08053), with shares of any size.

Y = X Wᵀ split by output features (column parallel: every rank computes its features from the whole X) or by
input features (row parallel: every rank computes an addend of the whole Y from its features).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tp.layers.handles import LinearPartial, Normed, column_linear, row_parallel_input
from tp.layers.layout import Layout
from tp.layers.parameter import ParallelModule, SharedSlice, replicated_parts
from tp.parallel.group import TensorParallelGroup
from tp.parallel.partition import feature_ranges, held_segments, kv_head_ranges, query_head_ranges, shared_parts


@dataclass(frozen=True)
class FeatureShares:
    """How one linear's features are dealt out.

    Attributes:
        name: the linear's own name in the Hub layout where it is fused with siblings, else "".
        ranges: the units of every rank; ranges of different ranks may overlap.
        unit: features a unit takes (head_dim for heads).
        num_units: units of the whole linear.
    """

    name: str
    ranges: tuple[range, ...]
    unit: int
    num_units: int

    @classmethod
    def of_features(cls, num_features: int, group: TensorParallelGroup, name: str = "") -> FeatureShares:
        """Shares of an MLP's features: whole blocks, see `feature_ranges`."""
        return cls(name, feature_ranges(num_features, group.size), 1, num_features)

    def local_features(self, rank: int) -> int:
        return len(self.ranges[rank]) * self.unit


class MergedColumnParallelLinear(ParallelModule):
    """Several column-parallel linears of one input, as one matmul: y_i = [x W1_iᵀ + b1_i | x W2_iᵀ + b2_i | …].

    Forward: x whole on every rank → this rank's features of each linear, side by side.
    Backward: dx = Σ_ranks dy_i W_i (all-reduce or reduce-scatter, by the layout of x); dW_i = dy_iᵀ x.

    Args:
        in_features: width of x.
        shares: the linears, in the order in which their outputs lie.
        group: the ranks.

    Attributes:
        local_sizes: this rank's features of each linear.
    """

    def __init__(
        self,
        in_features: int,
        shares: Sequence[FeatureShares],
        group: TensorParallelGroup,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.group = group
        self.shares = tuple(shares)
        self.local_sizes = [share.local_features(group.rank) for share in shares]
        rows = sum(self.local_sizes)
        self.weight = nn.Parameter(torch.zeros(rows, in_features, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(rows, dtype=dtype, device=device)) if bias else None
        parts = tuple(
            part
            for share, start in zip(shares, self._local_starts(), strict=True)
            for part in shared_parts(
                share.name,
                share.ranges,
                group.rank,
                unit=share.unit,
                dim=0,
                local_start=start,
                global_length=share.num_units * share.unit,
            )
        )
        self.parameter_parts = {"weight": parts, "bias": parts} if bias else {"weight": parts}

    def shared_slices(self, layout: Layout) -> list[SharedSlice]:
        """Units held by several ranks (KV heads): each rank's query heads give only a part of their gradient."""
        slices = []
        for share, start in zip(self.shares, self._local_starts(), strict=True):
            own = share.ranges[self.group.rank]
            for segment in held_segments(share.ranges):
                if len(segment.holders) > 1:
                    held = self.group.rank in segment.holders
                    local_start = start + (segment.units.start - own.start) * share.unit if held else None
                    length = len(segment.units) * share.unit
                    slices += [SharedSlice(name, length, local_start) for name in self.parameter_parts]
        return slices

    def _local_starts(self) -> list[int]:
        return [sum(self.local_sizes[:index]) for index in range(len(self.local_sizes))]

    def extra_repr(self) -> str:
        outputs = ", ".join(
            f"{share.name or 'out_features'}={size} of {share.num_units * share.unit}"
            for share, size in zip(self.shares, self.local_sizes, strict=True)
        )
        return f"in_features={self.weight.shape[1]}, {outputs}, {_bias_and_rank(self)}"

    def forward(self, x: Tensor | Normed) -> Tensor:
        """[..., in_features], replicated or from the stream → [..., Σ local_sizes]."""
        return column_linear(x, self.weight, self.bias, self.group)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """y_i = x W_iᵀ + b_i: this rank's output features, in whole blocks (see `feature_ranges`).

    A `RowParallelLinear` with as many input features takes y_i as it is.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: TensorParallelGroup,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        shares = [FeatureShares.of_features(out_features, group)]
        super().__init__(in_features, shares, group, bias=bias, dtype=dtype, device=device)


class QKVParallelLinear(MergedColumnParallelLinear):
    """q, k and v projections: this rank's query heads and exactly the KV heads that they read.

    A KV head may live on several ranks; each computes it from the same weights.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        group: TensorParallelGroup,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        queries = query_head_ranges(num_heads, group.size)
        kv_heads = kv_head_ranges(num_heads, num_kv_heads, group.size)
        shares = [
            FeatureShares("q_proj", queries, head_dim, num_heads),
            FeatureShares("k_proj", kv_heads, head_dim, num_kv_heads),
            FeatureShares("v_proj", kv_heads, head_dim, num_kv_heads),
        ]
        super().__init__(hidden_size, shares, group, bias=bias, dtype=dtype, device=device)


def merged_columns(out_features: Mapping[str, int], group: TensorParallelGroup) -> list[FeatureShares]:
    """Shares of linears fused by name, as {"gate_proj": n, "up_proj": n}, for `MergedColumnParallelLinear`."""
    return [FeatureShares.of_features(size, group, name) for name, size in out_features.items()]


class RowParallelLinear(ParallelModule):
    """Y = Σ_ranks x_i W_iᵀ + b: this rank's addend, left as a `LinearPartial` for the stream or `.reduce()` to combine.

    Forward: x_i, this rank's input features → partial sum [..., out_features]; the bias is added once, after the sum.
    Backward: dx_i = dy W_i; dW_i = dyᵀ x_i; db = Σ_tokens dy.

    Args:
        shares: which input features each rank has; by default whole blocks, as `ColumnParallelLinear` gives them.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: TensorParallelGroup,
        *,
        bias: bool = False,
        shares: FeatureShares | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.group = group
        self.in_features = in_features
        shares = shares or FeatureShares.of_features(in_features, group)
        local = shares.local_features(group.rank)
        self.weight = nn.Parameter(torch.zeros(out_features, local, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None
        self.parameter_parts["weight"] = tuple(
            shared_parts(
                "", shares.ranges, group.rank, unit=shares.unit, dim=1, local_start=0, global_length=in_features
            )
        )
        if bias:
            self.parameter_parts["bias"] = replicated_parts(out_features, group)

    def shared_slices(self, layout: Layout) -> list[SharedSlice]:
        """The bias is added to this rank's tokens only where they are sharded."""
        return [SharedSlice("bias", len(self.bias), 0)] if self.bias is not None and layout.sharded else []

    def extra_repr(self) -> str:
        out_features, local = self.weight.shape
        return f"in_features={local} of {self.in_features}, out_features={out_features}, {_bias_and_rank(self)}"

    def forward(self, x: Tensor) -> LinearPartial:
        """[..., this rank's input features] → this rank's addend of [..., out_features].

        Raises:
            LayoutError: `x` is a handle of the stream, or a partial sum.
        """
        return LinearPartial(row_parallel_input(x), self.weight, self.group, self.bias)


def _bias_and_rank(linear: MergedColumnParallelLinear | RowParallelLinear) -> str:
    return f"bias={linear.bias is not None}, rank={linear.group.rank} of {linear.group.size}"
