"""Rotary position embedding: the cos and sin of a step's tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from tp.kernels.rotary import cos_and_sin
from tp.layers.rope_frequencies import (
    attention_scaling,
    default_inverse_frequencies,
    dynamic_ntk_theta,
    inverse_frequencies,
)
from tp.layers.step import Step
from tp.rope_config import RopeConfig


class RotaryEmbedding:
    """cos and sin for the tokens of a step, shared by all layers.

    Angles, cos, sin and attention scaling are float32 (float64 is cast from them); the result has the stream's dtype.
    It holds no parameters and no buffers: a model can be built on the meta device around it.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, max_position_embeddings: int) -> None:
        self.rope = rope
        self.head_dim = head_dim
        self.max_position_embeddings = max_position_embeddings
        self.attention_scaling = attention_scaling(rope)
        self._inverse_frequencies = inverse_frequencies(rope, head_dim)

    def __call__(self, step: Step, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each [N, 1, head_dim] in `dtype`."""
        cos, sin = cos_and_sin(step.positions(), self._frequencies(step), self.attention_scaling, dtype)
        return cos.unsqueeze(1), sin.unsqueeze(1)

    def _frequencies(self, step: Step) -> Tensor:
        """[d/2], or [N, d/2] where they depend on the length of each sequence."""
        device = step.token_ids.device
        if self._inverse_frequencies.device != device:
            self._inverse_frequencies = self._inverse_frequencies.to(device)
        if self.rope.rope_type != "dynamic":
            return self._inverse_frequencies
        return torch.cat([self._dynamic(s.known_length, device).expand(s.length, -1) for s in step.sequences])

    def _dynamic(self, length: int, device: torch.device) -> Tensor:
        if length <= self.max_position_embeddings:
            return self._inverse_frequencies
        theta = dynamic_ntk_theta(self.rope, self.head_dim, self.max_position_embeddings, length)
        return default_inverse_frequencies(theta, self.head_dim).to(device)
