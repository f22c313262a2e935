"""Weights kept as int8 with one float32 scale an output channel: W_no ≈ scale_n · value_no."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tp.errors import RequestError

LARGEST_VALUE = 127


class Int8Weight(nn.Module):
    """A weight [out, in] in int8, for inference only.

    Attributes:
        values: [out, in] int8, from −127 to 127, contiguous.
        scales: [out] float32.
        dtype: of the weight that it stands for, and of what is computed with it.
    """

    values: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, largest: Tensor) -> None:
        """Rounds `weight` to the nearest multiples of its rows' scales.

        Args:
            weight: [out, in]
            largest: [out], the largest magnitude of each row of the whole, unsharded weight: the integers must not
                depend on how it is split.
        """
        super().__init__()
        self.training = False
        self.dtype = weight.dtype
        scales = largest.float() / LARGEST_VALUE
        scales = scales.where(scales != 0, 1.0)  # NaN stays, and shows in every product
        self.register_buffer("scales", scales)
        self.register_buffer("values", (weight / scales.unsqueeze(1)).round_().to(torch.int8).contiguous())

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def train(self, mode: bool = True) -> Int8Weight:
        """Stays in eval mode.

        Raises:
            RequestError: `mode` is True.
        """
        if mode:
            raise RequestError("the model has int8 weights, for inference only: load it again to train it")
        return super().train(False)

    def rows(self, indices: Tensor) -> Tensor:
        """The given rows of the weight, [..., in] in its dtype."""
        return (self.values[indices] * self.scales[indices].unsqueeze(-1)).to(self.dtype)
