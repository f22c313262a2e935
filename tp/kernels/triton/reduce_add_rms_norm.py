"""Sum over ranks + residual add + RMSNorm, in Triton, on addends that every rank can address.

One-shot: each rank reads all addends, adds and normalises; one launch, t reads of everything: for small messages.
Two-shot: each rank sums its share of the rows, then reads the others' shares: 2 reads of everything, whatever t is.

    u = cast(Σ_ranks addend), in rank order, accumulated in float32;  u ← cast(u + bias)
    state = cast(residual + u);  normed = RMSNorm(state) · cast(w)

A launch here waits for nobody. The caller sees to it that addends (and, between the two shots, sums) are there before
it, and not written again before all ranks are done: `tp.kernels.triton.symmetric_memory`. Inference only.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp.kernels.triton.norm_of_rows import plus_bias, settle, tile_rows
from tp.kernels.triton.rows import SEPARATE_ROUNDINGS, Tiling, on_device_of, readable_rows


def one_shot_reduce(
    addresses: Tensor, rows: range, bias: Tensor | None, residual: Tensor | None, weight: Tensor, eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Sums some rows of the ranks' addends and settles them; state and normed, each [len(rows), D].

    Args:
        addresses: [t] int64, where each rank's addends [≥ rows.stop, D] begin: contiguous, 16-byte aligned.
        rows: of the addends: all, or this rank's where the stream is sharded by tokens.
        bias: [D]. residual: [len(rows), D] in `dtype`; only read.
        weight: [D], any floating dtype. D ≤ 16384.
        dtype: of the addends.
    """
    width = len(weight)
    state, normed = (torch.empty(len(rows), width, dtype=dtype, device=weight.device) for _ in range(2))
    base = None if residual is None else readable_rows(residual)
    tiling = Tiling.of_width(width)
    if len(rows):
        with on_device_of(weight):
            _one_shot_kernel[(tiling.programs(len(rows)),)](
                addresses, None if bias is None else bias.contiguous(), base, weight.contiguous(), state, normed,
                0 if base is None else base.stride(0), rows.start, len(rows), width, eps,
                RANKS=len(addresses), ROWS=tiling.rows, BLOCK=tiling.block, num_warps=tiling.num_warps,
                **SEPARATE_ROUNDINGS,
            )  # fmt: skip
    return state, normed


def reduce_rows(addresses: Tensor, own: Tensor, rows: range, bias: Tensor | None) -> None:
    """The first shot: u of some rows, written over this rank's own addends of those rows, which nobody else reads.

    Args:
        addresses: as in `one_shot_reduce`.
        own: [N, D], this rank's addends, contiguous: the memory at its address.
        rows: those that this rank sums, see `tp.parallel.partition.chunk_ranges`.
        bias: [D].
    """
    width = own.shape[1]
    tiling = Tiling.of_width(width)
    if len(rows):
        with on_device_of(own):
            _reduce_kernel[(tiling.programs(len(rows)),)](
                addresses, None if bias is None else bias.contiguous(), own, rows.start, len(rows), width,
                RANKS=len(addresses), ROWS=tiling.rows, BLOCK=tiling.block, num_warps=tiling.num_warps,
                **SEPARATE_ROUNDINGS,
            )  # fmt: skip


def gather_and_settle(
    addresses: Tensor, rows_per_rank: int, num_rows: int, residual: Tensor | None, weight: Tensor, eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The second shot: reads u of each row at the rank that summed it; state and normed, each [N, D].

    Args:
        addresses, residual, weight, dtype: as in `one_shot_reduce`, for all `num_rows` rows; rank r holds u of rows
            r · rows_per_rank and following.
    """
    width = len(weight)
    state, normed = (torch.empty(num_rows, width, dtype=dtype, device=weight.device) for _ in range(2))
    base = None if residual is None else readable_rows(residual)
    tiling = Tiling.of_width(width)
    if num_rows:
        with on_device_of(weight):
            _gather_kernel[(tiling.programs(num_rows),)](
                addresses, base, weight.contiguous(), state, normed,
                0 if base is None else base.stride(0), rows_per_rank, num_rows, width, eps,
                ROWS=tiling.rows, BLOCK=tiling.block, num_warps=tiling.num_warps, **SEPARATE_ROUNDINGS,
            )  # fmt: skip
    return state, normed


@triton.jit
def _sum_over_ranks(addresses, bias, offsets, inside, columns, width, dtype: tl.constexpr, RANKS: tl.constexpr):
    """u of a tile in `dtype`: the addends in rank order, rank 0 first; then the bias."""
    first = tl.multiple_of(tl.load(addresses).to(tl.pointer_type(dtype)), 16)
    total = tl.load(first + offsets, mask=inside, other=0).to(tl.float32)
    for rank in tl.static_range(1, RANKS):
        peer = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(dtype)), 16)
        total += tl.load(peer + offsets, mask=inside, other=0).to(tl.float32)
    return plus_bias(total.to(dtype), bias, columns, width)


@triton.jit
def _one_shot_kernel(
    addresses, bias, residual, weight, state, normed, residual_stride, first_row, num_rows, width, eps,
    RANKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tile_rows(ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    offsets = (first_row + rows)[:, None] * width + columns[None, :]
    update = _sum_over_ranks(addresses, bias, offsets, inside, columns, width, state.dtype.element_ty, RANKS)
    own_offsets = rows[:, None] * width + columns[None, :]
    settle(
        update, residual, rows[:, None] * residual_stride + columns[None, :], weight,
        state + own_offsets, normed + own_offsets, inside, columns, width, eps,
    )  # fmt: skip


@triton.jit
def _reduce_kernel(
    addresses, bias, own, first_row, num_rows, width,
    RANKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tile_rows(ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    offsets = (first_row + rows)[:, None] * width + columns[None, :]
    update = _sum_over_ranks(addresses, bias, offsets, inside, columns, width, own.dtype.element_ty, RANKS)
    tl.store(own + offsets, update, mask=inside)


@triton.jit
def _gather_kernel(
    addresses, residual, weight, state, normed, residual_stride, rows_per_rank, num_rows, width, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tile_rows(ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    holders = tl.load(addresses + rows // rows_per_rank, mask=rows < num_rows, other=0)
    peers = tl.multiple_of(holders.to(tl.pointer_type(state.dtype.element_ty)), 16)
    offsets = rows[:, None] * width + columns[None, :]
    update = tl.load(peers[:, None] + offsets, mask=inside, other=0)
    settle(
        update, residual, rows[:, None] * residual_stride + columns[None, :], weight,
        state + offsets, normed + offsets, inside, columns, width, eps,
    )  # fmt: skip
