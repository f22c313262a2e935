"""Sum over ranks + add + norm of addends in symmetric memory: the launches, and the wait between two of them.

The first wait, for all addends to be there, is `SymmetricBuffers.hand_over`'s.
"""

from __future__ import annotations

from torch import Tensor

from tp.kernels.triton.reduce_add_rms_norm import gather_and_settle, one_shot_reduce, reduce_rows
from tp.parallel.partition import ceil_div, chunk_ranges
from tp.parallel.symmetric_memory import Addends


def one_shot(
    addends: Addends, rows: range, bias: Tensor | None, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """State and norm of some rows; see `tp.kernels.reduce_add_rms_norm`.

    Args:
        addends: [N, D] of each rank.
        rows: all, or this rank's where the stream is sharded by tokens; residual has as many.
    """
    return one_shot_reduce(addends.addresses, rows, bias, residual, weight, eps, addends.own.dtype)


def two_shot(
    addends: Addends, bias: Tensor | None, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """State and norm of all rows, with less traffic than `one_shot` between more than two ranks, and one more wait."""
    num_rows, num_ranks = len(addends.own), len(addends.of_ranks)
    reduce_rows(addends.addresses, addends.own, chunk_ranges(num_rows, num_ranks)[addends.rank], bias)
    addends.wait()
    rows_per_rank = ceil_div(num_rows, num_ranks)
    return gather_and_settle(
        addends.addresses, rows_per_rank, num_rows, residual, weight, eps, addends.own.dtype
    )  # fmt: skip
