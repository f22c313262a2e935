"""Vocabulary-parallel embedding and LM head: rank r owns rows [r·⌈V/t⌉, (r+1)·⌈V/t⌉) of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tp.kernels.embedding_lookup import embedding_lookup
from tp.layers.handles import Normed, Partial, column_linear
from tp.layers.parameter import ParallelModule
from tp.layers.sharded_logits import ShardedLogits
from tp.parallel.group import TensorParallelGroup
from tp.parallel.partition import ceil_div, chunk_ranges, shared_parts


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
        rows = embedding_lookup(self.weight, token_ids, self.vocab_range.start, len(self.vocab_range))
        return Partial(rows, self.group)


class ParallelLMHead(_VocabParallel):
    """logits_i = x W_iᵀ: this rank's columns of the vocabulary. Tied to the embedding by sharing its `weight`."""

    def forward(self, x: Tensor | Normed) -> ShardedLogits:
        """[B, D] → [B, V] as shards [B, ⌈V/t⌉]."""
        local = column_linear(x, self.weight, None, self.group)
        return ShardedLogits(local, self.group, self.vocab_size)
