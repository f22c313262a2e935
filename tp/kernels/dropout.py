"""Dropout whose mask depends on what is dropped, not on who drops it: the same at every degree and layout."""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: 2^64 / golden ratio
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def keep_mask(seed: int, site: int, rows: Tensor, columns: Tensor, probability: float) -> Tensor:
    """True where an element is kept: a hash of (seed, site, row, column) against the dropout probability.

    Args:
        seed: of this training step.
        site: which dropout of the model.
        rows, columns: int64 indices of the whole, unsharded tensor; broadcast against each other.
        probability: of being dropped, in [0, 1).
    """
    key = _mix(_mix(torch.tensor(seed, dtype=torch.int64, device="cpu")) + site)
    bits = _mix(_mix(rows + key.to(rows.device)) + columns)
    uniform = ((bits >> 40) & 0xFFFFFF).to(torch.float32) / 2**24
    return uniform >= probability


def _mix(x: Tensor) -> Tensor:
    """SplitMix64 (Steele, Lea and Flood 2014): a step of the Weyl sequence and its finaliser; int64 wraps around."""
    x = x + _GOLDEN
    x = (x ^ _logical_shift(x, 30)) * _MIX_1
    x = (x ^ _logical_shift(x, 27)) * _MIX_2
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)
