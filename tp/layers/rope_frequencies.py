"""What each rope type makes of the wavelengths: inverse frequencies, the base past the context, the scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tp.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[d/2] float32 on the CPU: the angle a position of each pair of channels, within the trained context."""
    plain = default_inverse_frequencies(rope.rope_theta, head_dim)
    if rope.rope_type == "linear":
        assert rope.factor is not None
        return plain / rope.factor
    if rope.rope_type == "llama3":
        return llama3_inverse_frequencies(plain, rope)
    if rope.rope_type == "yarn":
        return yarn_inverse_frequencies(plain, rope, head_dim)
    return plain


def default_inverse_frequencies(theta: float, head_dim: int) -> Tensor:
    """θ^(−2i/d) for i in 0..d/2−1 (Su et al. 2021, arXiv:2104.09864)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return 1.0 / theta**exponents


def dynamic_ntk_theta(rope: RopeConfig, head_dim: int, max_position_embeddings: int, length: int) -> float:
    """θ · (s·L/L₀ − (s−1))^(d/(d−2)): the base grows with the sequence, past the trained context L₀."""
    assert rope.factor is not None
    stretch: float = rope.factor * length / max_position_embeddings - (rope.factor - 1)
    return rope.rope_theta * float(stretch ** (head_dim / (head_dim - 2)))


def llama3_inverse_frequencies(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: wavelengths past L₀/low_freq_factor are slowed by `factor`, below L₀/high_freq_factor kept.

    In between the two are mixed, linearly in L₀/wavelength.
    """
    assert rope.factor is not None
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    assert rope.original_max_position_embeddings is not None
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * plain / rope.factor + kept * plain


def yarn_inverse_frequencies(plain: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): slow channels interpolated, fast ones kept, a ramp between."""
    assert rope.factor
    assert rope.original_max_position_embeddings

    def channel_of(turns: float) -> float:
        """The (fractional) channel pair that makes `turns` turns within the trained context."""
        assert rope.original_max_position_embeddings
        wavelength = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.rope_theta))

    low, high = channel_of(rope.beta_fast or 32), channel_of(rope.beta_slow or 1)
    if rope.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def attention_scaling(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: YaRN's temperature, 0.1·ln(factor) + 1 unless the config says; else 1."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    assert rope.factor is not None
    if rope.mscale and rope.mscale_all_dim:
        return _temperature(rope.factor, rope.mscale) / _temperature(rope.factor, rope.mscale_all_dim)
    return _temperature(rope.factor, 1.0)


def _temperature(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
