"""y = x Wᵀ + b with int8 weights, in Triton: each program widens its tile of integers, which x's dtypes hold exactly.

One row of x is a sum of products; more rows are matrix products. Where few outputs meet many columns, programs share
the columns, and a second kernel adds up.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp.kernels.triton.rows import JOINT_ROUNDINGS, next_power_of_two, on_device_of, readable_rows
from tp.parallel.partition import ceil_div

_ROW_OUTPUTS, _ROW_COLUMNS = 4, 2048
"""Of a program with one row of x: each of its 128 threads loads 16 bytes of each of the 4 rows of weights."""
_PROGRAMS = 264
"""Two for each multiprocessor of an H200. A constant, and not asked of the device, so that the order of the sums is
the same on every one."""
_SPLIT_COLUMNS = 4096
"""The fewest columns that are worth a program of their own, and the second kernel."""
_FINISH_BLOCK = 1024


class Tiles(NamedTuple):
    """What a program multiplies at a time where x has several rows, and how it is launched.

    Attributes:
        rows: of x; more than there are, up to the next of these sizes.
        outputs: rows of weights.
        columns: of both.
        num_warps, num_stages: of the launch. What the stages keep fits into 99 KiB, the least that GPUs with bfloat16
            have.
    """

    rows: int
    outputs: int
    columns: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, num_rows: int, out_features: int, dtype: torch.dtype) -> "Tiles":
        """For x of so many rows. Up to 64, reading the weights takes the time; above, the products."""
        if dtype == torch.float32:  # without tensor cores: what a thread multiplies lies in its registers
            return cls(16, 64, 32, 4, 3) if num_rows <= 16 else cls(64, 64, 16, 8, 3)
        if num_rows <= 16:
            return cls(16, 64 if out_features >= 64 * _PROGRAMS else 32, 256, 4, 4)
        if num_rows <= 64:
            return cls(64, 64, 128, 4, 3)
        return cls(128, 128, 64, 4, 3)

    def share(self, num_rows: int, out_features: int, in_features: int) -> int:
        """Columns of a program: all, or whole tiles of them where several programs share a tile of y."""
        tiles = ceil_div(num_rows, self.rows) * ceil_div(out_features, self.outputs)
        programs = min(_PROGRAMS // tiles, in_features // _SPLIT_COLUMNS)
        if programs <= 1:
            return in_features
        return ceil_div(ceil_div(in_features, programs), self.columns) * self.columns


def int8_linear(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """y_n = scale_n · Σ_k x_k value_nk + b_n: accumulated, scaled and biased in float32, rounded once.

    Nothing is read back to the host, and shapes alone decide what is launched.

    Args:
        x: [..., in].
        values: [out, in] int8. scales: [out] float32.
        bias: [out], any floating dtype.

    Returns:
        [..., out] in x's dtype, contiguous.
    """
    rows, weights = readable_rows(x), readable_rows(values)
    y = torch.empty(*x.shape[:-1], len(weights), dtype=x.dtype, device=x.device)
    if y.numel():
        with on_device_of(x):
            launch = _launch_row if len(rows) == 1 else _launch_tiles
            launch(rows, weights, scales.contiguous(), None if bias is None else bias.contiguous(), y)
    return y


def _launch_row(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, y: Tensor) -> None:
    out_features, in_features = values.shape
    columns = min(_ROW_COLUMNS, next_power_of_two(in_features))
    _row_kernel[(ceil_div(out_features, _ROW_OUTPUTS),)](
        x, values, scales, bias, y, values.stride(0), out_features, in_features,
        OUTPUTS=_ROW_OUTPUTS, COLUMNS=columns, num_warps=4, **JOINT_ROUNDINGS,
    )  # fmt: skip


def _launch_tiles(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, y: Tensor) -> None:
    (num_rows, in_features), out_features = x.shape, len(values)
    tiles = Tiles.of(num_rows, out_features, x.dtype)
    share = tiles.share(num_rows, out_features, in_features)
    splits = ceil_div(in_features, share)
    if splits == 1:
        _multiply(x, values, scales, bias, y, tiles, share)
        return
    sums = y.new_empty(splits, num_rows, out_features, dtype=torch.float32)
    _multiply(x, values, None, None, sums, tiles, share)
    _finish_kernel[(num_rows, ceil_div(out_features, _FINISH_BLOCK))](
        sums, scales, bias, y, splits, out_features, BLOCK=_FINISH_BLOCK, **JOINT_ROUNDINGS
    )


def _multiply(
    x: Tensor, values: Tensor, scales: Tensor | None, bias: Tensor | None, y: Tensor, tiles: Tiles, share: int
) -> None:
    """y itself, or without scales the sums [splits, rows, outputs] over `share` columns each."""
    (num_rows, in_features), out_features = x.shape, len(values)
    programs = ceil_div(num_rows, tiles.rows) * ceil_div(out_features, tiles.outputs)
    _tile_kernel[(programs, ceil_div(in_features, share))](
        x, values, scales, bias, y, x.stride(0), values.stride(0), num_rows, out_features, in_features, share,
        ROWS=tiles.rows, OUTPUTS=tiles.outputs, COLUMNS=tiles.columns,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **JOINT_ROUNDINGS,
    )  # fmt: skip


@triton.jit
def _row_kernel(
    x, values, scales, bias, y, stride, out_features, in_features, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Some outputs of one row: products are summed by column, then over the columns."""
    outputs = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    real = outputs < out_features
    total = tl.zeros([OUTPUTS, COLUMNS], dtype=tl.float32)
    for start in range(0, in_features, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        within = columns < in_features
        w = tl.load(
            values + outputs[:, None] * stride + columns[None, :], mask=real[:, None] & within[None, :], other=0
        )
        total += w.to(tl.float32) * tl.load(x + columns, mask=within, other=0).to(tl.float32)[None, :]
    result = _scaled(tl.sum(total, axis=1), scales, bias, outputs, real)
    tl.store(y + outputs, result.to(y.dtype.element_ty), mask=real)


@triton.jit
def _tile_kernel(
    x, values, scales, bias, y, x_stride, stride, num_rows, out_features, in_features, share,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of y, [rows, outputs], over the columns of one split; without scales, the sums themselves.

    Programs that run together have 8 tiles of rows between them, so that they find x and the weights in the cache.
    """
    row_tiles, output_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(out_features, OUTPUTS)
    tile, split = tl.program_id(0), tl.program_id(1)
    row_tile, output_tile = tl.swizzle2d(tile // output_tiles, tile % output_tiles, row_tiles, output_tiles, 8)
    rows = row_tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    outputs = output_tile.to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    given, real = (rows < num_rows)[:, None], (outputs < out_features)[None, :]
    total = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    for start in range(split * share, tl.minimum((split + 1) * share, in_features), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        within = columns < in_features
        x_tile = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=given & within[None, :], other=0)
        w = tl.load(values + outputs[None, :] * stride + columns[:, None], mask=real & within[:, None], other=0)
        total = tl.dot(x_tile, w.to(tl.float32).to(x_tile.dtype), total, input_precision="ieee")
    if scales is not None:
        total = _scaled(total, scales, bias, outputs[None, :], real)
    target = y + (split * num_rows + rows[:, None]) * out_features + outputs[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=given & real)


@triton.jit
def _finish_kernel(sums, scales, bias, y, splits, out_features, BLOCK: tl.constexpr):
    """One row of y from its sums [splits, rows, outputs], in the order of the columns."""
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = outputs < out_features
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for split in range(splits):
        total += tl.load(sums + (split * num_rows + row) * out_features + outputs, mask=real, other=0)
    result = _scaled(total, scales, bias, outputs, real)
    tl.store(y + row * out_features + outputs, result.to(y.dtype.element_ty), mask=real)


@triton.jit
def _scaled(total, scales, bias, outputs, real):
    """total · scale + bias of its outputs, in float32."""
    total *= tl.load(scales + outputs, mask=real, other=0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + outputs, mask=real, other=0).to(tl.float32)
    return total
