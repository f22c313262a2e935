"""Logits split by vocabulary, and the normaliser of a row that no rank holds whole."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from tp.kernels.argmax_and_sum_exp import LOWEST
from tp.parallel.group import TensorParallelGroup
from tp.parallel.mappings import gather_last_dim_from_region


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

    @property
    def valid(self) -> Tensor:
        """[..., num_valid]: the columns of `local` that are no padding, a view."""
        return self.local[..., : self.num_valid]

    def padded(self, values: Tensor) -> Tensor:
        """[..., num_valid] → [..., ⌈V/t⌉], `LOWEST` in the padding, so that it is chosen last."""
        return functional.pad(values, (0, self.local.shape[-1] - self.num_valid), value=LOWEST)

    def whole(self) -> Tensor:
        """[..., V] on every rank: all-gather, padding removed."""
        return gather_last_dim_from_region(self.local, self.group)[..., : self.vocab_size]


def log_sum_exp(maxima: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """(M, ln Σ exp(x − M)) of rows x that are split by vocabulary, M = max x; each [...].

    Apart, since the second is small where their sum may be large and coarse.

    Args:
        maxima: [t, ...], m of each rank: the maximum of its columns, the dtype's lowest finite value where it has none.
        sums: [t, ...], Σ exp(x − m) over them.
    """
    top = maxima.amax(0)
    return top, (sums * (maxima - top).exp()).sum(0).log()
