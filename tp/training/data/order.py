"""Random orders fixed by their seeds alone: not by a library's generator, its version, or what was drawn before."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def shuffled(count: int, *seeds: int) -> npt.NDArray[np.int64]:
    """The numbers below `count` in an order that the seeds fix."""
    return np.argsort(hashed(np.arange(count, dtype=np.uint64), *seeds), kind="stable")


def hashed(values: npt.NDArray[np.uint64], *seeds: int) -> npt.NDArray[np.uint64]:
    """A hash of each value and the seeds."""
    key = np.zeros(1, dtype=np.uint64)
    for seed in seeds:
        key = _mix(key ^ np.uint64(seed % 2**64))
    return _mix(_mix(values) ^ key)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea and Flood 2014): a step of the Weyl sequence and its finaliser; uint64 wraps around."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    x ^= x >> np.uint64(31)
    return x
