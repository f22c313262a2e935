"""RMSNorm as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tp.kernels.rms_norm import rms_norm
from tp.layers.layout import Layout
from tp.layers.parameter import ParallelModule, SharedSlice, replicated_parts
from tp.parallel.group import TensorParallelGroup


class RMSNorm(ParallelModule):
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

    def shared_slices(self, layout: Layout) -> list[SharedSlice]:
        """Each rank norms its own tokens only where they are sharded."""
        return [SharedSlice("weight", len(self.weight), 0)] if layout.sharded else []

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D], statistics in float32."""
        return rms_norm(x, self.weight, self.eps)


class HeadRMSNorm(RMSNorm):
    """RMSNorm over head_dim of this rank's heads (Qwen3's q_norm and k_norm): [N, H, head_dim] → the same."""

    def shared_slices(self, layout: Layout) -> list[SharedSlice]:
        """Each rank norms its own heads only, in every layout."""
        return [SharedSlice("weight", len(self.weight), 0)] if layout.group.size > 1 else []
