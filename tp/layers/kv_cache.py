"""Keys and values of earlier tokens: preallocated, this rank's KV heads only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tp.config import ModelConfig
from tp.errors import CapacityError
from tp.layers.step import SequenceSlice, Step
from tp.parallel.group import TensorParallelGroup
from tp.parallel.partition import kv_head_ranges


@dataclass(frozen=True)
class LayerCache:
    """One layer's cache.

    Attributes:
        key, value: cache_BHTd = [num_slots, this rank's KV heads, capacity, head_dim].
    """

    key: Tensor
    value: Tensor

    def append(self, piece: SequenceSlice, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores new tokens of one sequence, [H, length, d], and returns all of its keys and values, [H, T, d]."""
        stop = piece.start + piece.length
        self.key[piece.slot, :, piece.start : stop] = key
        self.value[piece.slot, :, piece.start : stop] = value
        return self.key[piece.slot, :, :stop], self.value[piece.slot, :, :stop]


class KVCache:
    """A cache of `num_slots` sequences of up to `capacity` tokens in every layer.

    A slot is used again by starting again at position 0.
    """

    def __init__(
        self,
        config: ModelConfig,
        group: TensorParallelGroup,
        num_slots: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        heads = _local_kv_heads(config, group)
        shape = (num_slots, heads, capacity, config.head_dim)
        device = device or group.device
        self.num_slots = num_slots
        self.capacity = capacity
        self.layers = [
            LayerCache(torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
            for _ in range(config.num_layers)
        ]

    def check_room(self, step: Step) -> None:
        """Kernels write where the step says.

        Raises:
            CapacityError: a slot that there is not, or more tokens than a slot holds.
        """
        for piece in step.sequences:
            if not 0 <= piece.slot < self.num_slots or piece.start + piece.length > self.capacity:
                tokens = f"tokens {piece.start} to {piece.start + piece.length - 1} of slot {piece.slot}"
                raise CapacityError(f"{tokens} do not fit a cache of {self.num_slots} x {self.capacity} tokens")

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's cache."""
        return sum(layer.key.nbytes + layer.value.nbytes for layer in self.layers)

    @staticmethod
    def bytes_needed(
        config: ModelConfig, group: TensorParallelGroup, num_slots: int, capacity: int, dtype: torch.dtype
    ) -> int:
        """Bytes that a cache of these sizes takes on this rank, without making it."""
        tokens = num_slots * capacity * config.num_layers
        return 2 * tokens * _local_kv_heads(config, group) * config.head_dim * dtype.itemsize


def _local_kv_heads(config: ModelConfig, group: TensorParallelGroup) -> int:
    return len(kv_head_ranges(config.num_attention_heads, config.num_kv_heads, group.size)[group.rank])
