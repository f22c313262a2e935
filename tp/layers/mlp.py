"""The MLPs: gated, down(activation(gate(x)) · up(x)), and plain, down(activation(up(x)))."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tp.kernels.gated_activation import ACTIVATION_FUNCTIONS, activation_and_mul
from tp.layers.handles import LinearPartial, Normed
from tp.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear, merged_columns
from tp.parallel.group import TensorParallelGroup


class GatedMLP(nn.Module):
    """m = down_proj(activation(gate_proj(x)) · up_proj(x)): column parallel, then row parallel.

    Args:
        hidden_size, intermediate_size: global widths.
        activation: of the gate, see `tp.config.ACTIVATIONS`.
        bias: on all three linears.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        group: TensorParallelGroup,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        columns = merged_columns({"gate_proj": intermediate_size, "up_proj": intermediate_size}, group)
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, columns, group, bias=bias, dtype=dtype, device=device
        )
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, group, bias=bias, dtype=dtype, device=device)

    def forward(self, x: Tensor | Normed) -> LinearPartial:
        """[N, D] → this rank's addend of [N, D]; the stream combines it with the other ranks'."""
        partial_sum: LinearPartial = self.down_proj(activation_and_mul(self.gate_up_proj(x), self.activation))
        return partial_sum


class PlainMLP(nn.Module):
    """m = down_proj(activation(up_proj(x))): the two matrices of the original Transformer (arXiv:1706.03762).

    Args:
        hidden_size, intermediate_size: global widths.
        activation: see `tp.config.ACTIVATIONS`.
        bias: on both linears.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        group: TensorParallelGroup,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.activation = ACTIVATION_FUNCTIONS[activation]
        self.up_proj = ColumnParallelLinear(
            hidden_size, intermediate_size, group, bias=bias, dtype=dtype, device=device
        )
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, group, bias=bias, dtype=dtype, device=device)

    def forward(self, x: Tensor | Normed) -> LinearPartial:
        """[N, D] → this rank's addend of [N, D]; the stream combines it with the other ranks'."""
        partial_sum: LinearPartial = self.down_proj(self.activation(self.up_proj(x)))
        return partial_sum
