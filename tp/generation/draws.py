"""Random numbers that depend on what they are for and on nothing else."""

from __future__ import annotations

import hashlib
import struct


def uniform(seed: int, sequence: int, step: int) -> float:
    """A number in [0, 1), uniform over the multiples of 2⁻⁵³, fixed by its three arguments (each in 0..2⁶⁴−1).

    A hash, not a generator with a state: the draw is the same at every tensor-parallel degree, whoever else is in the
    batch, and however the prompts fall into waves.
    """
    digest = hashlib.blake2b(struct.pack("<QQQ", seed, sequence, step), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
