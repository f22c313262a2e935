"""RMSNorm and LayerNorm as modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tp.kernels.rms_norm import rms_norm
from tp.layers.layout import Layout
from tp.layers.parameter import ParallelModule, SharedSlice, replicated_parts
from tp.parallel.group import TensorParallelGroup


class Norm(ParallelModule):
    """A norm over the last dim whose parameters, all of that size, every rank holds whole."""

    weight: nn.Parameter
    eps: float

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}"

    def shared_slices(self, layout: Layout) -> list[SharedSlice]:
        """Each rank norms its own tokens only where they are sharded."""
        return self._all_of_each() if layout.sharded else []

    def _all_of_each(self) -> list[SharedSlice]:
        return [SharedSlice(name, len(parameter), 0) for name, parameter in self.named_parameters()]


class RMSNorm(Norm):
    """y = x / sqrt(mean(x²) + eps) · weight over the last dim; the weight is replicated.

    Args:
        size: D, the normalised width.
        eps: added to the mean square.
        group: the ranks that hold the same weight.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        group: TensorParallelGroup,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))
        self.parameter_parts["weight"] = replicated_parts(size, group)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D], statistics in float32."""
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(Norm):
    """y = (x − mean(x)) / sqrt(var(x) + eps) · weight + bias over the last dim (Ba et al. 2016, arXiv:1607.06450).

    Args:
        size: D, the normalised width.
        eps: added to the variance.
        group: the ranks that hold the same weight and bias.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        group: TensorParallelGroup,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(size, dtype=dtype, device=device))
        self.parameter_parts["weight"] = self.parameter_parts["bias"] = replicated_parts(size, group)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D], statistics in float32 at least, rounded once."""
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return functional.layer_norm(x, (len(weight),), weight, bias, self.eps)


class HeadRMSNorm(RMSNorm):
    """RMSNorm over head_dim of this rank's heads (Qwen3's q_norm and k_norm): [N, H, head_dim] → the same."""

    def shared_slices(self, layout: Layout) -> list[SharedSlice]:
        """Each rank norms its own heads only, in every layout."""
        return self._all_of_each() if layout.group.size > 1 else []
