"""Vocabulary-parallel embedding and LM head: rank r owns rows [r·⌈V/t⌉, (r+1)·⌈V/t⌉) of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tp.kernels.look_up_rows import look_up_rows
from tp.layers.handles import Normed, Partial, column_linear
from tp.layers.parameter import ParallelModule
from tp.parallel.group import TensorParallelGroup
from tp.parallel.mappings import gather_last_dim_from_region
from tp.parallel.partition import ceil_div, chunk_ranges, shared_parts


@dataclass(frozen=True)
class ShardedLogits:
    """Logits split by vocabulary. A type of its own: what wants whole logits cannot be given a shard by mistake.

    Attributes:
        local: [..., ⌈V/t⌉] in the model's dtype; columns from `num_valid` on are padding.
        group: the ranks that hold the other columns.
        vocab_size: V, padding not counted.
    """

    local: Tensor
    group: TensorParallelGroup
    vocab_size: int

    @property
    def vocab_start_index(self) -> int:
        """Vocabulary id of this rank's first column."""
        return min(self.vocab_size, self.group.rank * self.local.shape[-1])

    @property
    def num_valid(self) -> int:
        """This rank's columns that are no padding; possibly none."""
        return max(0, min(self.local.shape[-1], self.vocab_size - self.vocab_start_index))

    def whole(self) -> Tensor:
        """[..., V] on every rank: all-gather, padding removed."""
        return gather_last_dim_from_region(self.local, self.group)[..., : self.vocab_size]


class _VocabParallel(ParallelModule):
    """A [⌈V/t⌉, D] shard of a vocabulary table; rows past the real ones are padding and belong to no part."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        group: TensorParallelGroup,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.group = group
        rows = ceil_div(vocab_size, group.size)
        self.vocab_range = chunk_ranges(vocab_size, group.size)[group.rank]
        self.weight = nn.Parameter(torch.zeros(rows, hidden_size, dtype=dtype, device=device))
        self.parameter_parts["weight"] = tuple(
            shared_parts(
                "", chunk_ranges(vocab_size, group.size), group.rank, unit=1, dim=0, local_start=0,
                global_length=vocab_size,
            )
        )  # fmt: skip

    def extra_repr(self) -> str:
        rows = f"vocab_size={len(self.vocab_range)} of {self.vocab_size}"
        return f"{rows}, hidden_size={self.weight.shape[1]}, rank={self.group.rank} of {self.group.size}"


class VocabParallelEmbedding(_VocabParallel):
    """x_0 = Σ_ranks (row of the table where this rank owns the id, else 0): a partial sum with one non-zero addend."""

    def forward(self, token_ids: Tensor) -> Partial:
        """[N] int64 → this rank's addend of [N, D]."""
        rows = look_up_rows(self.weight, token_ids, self.vocab_range.start, len(self.vocab_range))
        return Partial(rows, self.group)


class ParallelLMHead(_VocabParallel):
    """logits_i = x W_iᵀ: this rank's columns of the vocabulary. Tied to the embedding by sharing its `weight`."""

    def forward(self, x: Tensor | Normed) -> ShardedLogits:
        """[B, D] → [B, V] as shards [B, ⌈V/t⌉]."""
        local = column_linear(x, self.weight, None, self.group)
        return ShardedLogits(local, self.group, self.vocab_size)
