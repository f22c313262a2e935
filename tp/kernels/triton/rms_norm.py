"""RMSNorm in Triton: forward, and a backward whose weight gradient is summed in a fixed order."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp.kernels.triton.norm_of_rows import normed_rows, reciprocal_of_rows, tile_rows
from tp.kernels.triton.rows import JOINT_ROUNDINGS, SEPARATE_ROUNDINGS, Tiling, on_device_of, readable_rows
from tp.parallel.partition import ceil_div

_MAX_PARTIAL_SUMS = 512
"""Addends of the weight gradient: about as many programs as a large GPU runs at once. A constant, and not asked of
the device, so that the order of the sum is the same on every one."""
_SUM_ROWS, _SUM_COLUMNS = 32, 64


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y = cast(x · r) · cast(w) and r = rsqrt(mean(x²) + eps).

    Args:
        x: [..., D], D ≤ 16384.
        weight: [D], any floating dtype.

    Returns:
        y, [..., D] in x's dtype, contiguous; r, [..., 1] float32.
    """
    rows = readable_rows(x)
    num_rows, width = rows.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    reciprocal = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    tiling = Tiling.of_width(width)
    if num_rows:
        with on_device_of(x):
            _forward_kernel[(tiling.programs(num_rows),)](
                rows, weight.contiguous(), y, reciprocal, rows.stride(0), num_rows, width, eps,
                ROWS=tiling.rows, BLOCK=tiling.block, num_warps=tiling.num_warps, **SEPARATE_ROUNDINGS,
            )  # fmt: skip
    return y, reciprocal


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, reciprocal: Tensor) -> tuple[Tensor, Tensor]:
    """dx = r · (dn − h · mean(dn · h)) and dw = Σ_rows dy · cast(h), with h = x · r and dn = cast(dy · cast(w)).

    dw is summed in float32: each program sums the rows that it has, a second kernel sums the programs, both in an
    order that depends on the shape alone. `dy` is only read.

    Returns:
        dx, [..., D] in x's dtype; dw, [D] in the weight's dtype.
    """
    x_rows, dy_rows = readable_rows(x), readable_rows(dy)
    num_rows, width = x_rows.shape
    tiling = Tiling.of_width(width)
    steps = max(1, ceil_div(tiling.programs(num_rows), _MAX_PARTIAL_SUMS))  # tiles of a program
    programs = ceil_div(num_rows, steps * tiling.rows)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partial_sums = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    if programs:
        with on_device_of(x):
            _backward_kernel[(programs,)](
                dy_rows, x_rows, weight.contiguous(), reciprocal, dx, partial_sums,
                dy_rows.stride(0), x_rows.stride(0), num_rows, width, steps,
                ROWS=tiling.rows, BLOCK=tiling.block, num_warps=tiling.num_warps, **SEPARATE_ROUNDINGS,
            )  # fmt: skip
    return dx, _column_sums(partial_sums, weight.dtype)


def _column_sums(addends: Tensor, dtype: torch.dtype) -> Tensor:
    """[P, D] float32 → their sum over P in `dtype`, [D]."""
    num_addends, width = addends.shape
    total = torch.empty(width, dtype=dtype, device=addends.device)
    with on_device_of(addends):
        _column_sum_kernel[(ceil_div(width, _SUM_COLUMNS),)](
            addends, total, num_addends, width, ROWS=_SUM_ROWS, COLUMNS=_SUM_COLUMNS, **JOINT_ROUNDINGS
        )
    return total


@triton.jit
def _forward_kernel(x, weight, y, reciprocals, x_stride, num_rows, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tile_rows(ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    wide = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0).to(tl.float32)
    reciprocal = reciprocal_of_rows(wide, width, eps)
    w = tl.load(weight + columns, mask=columns < width, other=0)
    normed = normed_rows(wide, reciprocal, w, y.dtype.element_ty)
    tl.store(y + rows[:, None] * width + columns[None, :], normed, mask=inside)
    tl.store(reciprocals + rows, reciprocal, mask=rows < num_rows)


@triton.jit
def _backward_kernel(
    dy, x, weight, reciprocals, dx, partial_sums, dy_stride, x_stride, num_rows, width, steps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    dtype = dx.dtype.element_ty
    w = tl.load(weight + columns, mask=columns < width, other=0).to(dtype).to(tl.float32)
    d_weight = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for step in range(steps):
        rows = (program * steps + step) * ROWS + tl.arange(0, ROWS)
        inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
        r = tl.load(reciprocals + rows, mask=rows < num_rows, other=0)
        h = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0).to(tl.float32) * r[:, None]
        upstream = tl.load(dy + rows[:, None] * dy_stride + columns[None, :], mask=inside, other=0).to(tl.float32)
        d_weight += upstream * h.to(dtype).to(tl.float32)
        d_normed = (upstream * w[None, :]).to(dtype).to(tl.float32)
        projection = tl.sum(d_normed * h, axis=1) / width
        value = r[:, None] * (d_normed - h * projection[:, None])
        tl.store(dx + rows[:, None] * width + columns[None, :], value.to(dtype), mask=inside)
    tl.store(partial_sums + program * width + columns, tl.sum(d_weight, axis=0), mask=columns < width)


@triton.jit
def _column_sum_kernel(addends, total, num_addends, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    accumulated = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, num_addends, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < num_addends)[:, None] & (columns < width)[None, :]
        accumulated += tl.load(addends + rows[:, None] * width + columns[None, :], mask=inside, other=0)
    tl.store(total + columns, tl.sum(accumulated, axis=0).to(total.dtype.element_ty), mask=columns < width)
