"""RMSNorm as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tp.kernels.rms_norm import rms_norm
from tp.layers.parameter import ParallelModule, replicated_parts
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

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D], statistics in float32."""
        return rms_norm(x, self.weight, self.eps)
