"""One rank's part of the vocabulary-parallel cross-entropy, in Triton."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp.kernels.triton.rows import (
    JOINT_ROUNDINGS,
    SEPARATE_ROUNDINGS,
    next_power_of_two,
    on_device_of,
    readable_rows,
)
from tp.parallel.partition import ceil_div

_BLOCK = 4096
_LOWEST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).min)


def shard_statistics(logits: Tensor, targets: Tensor, num_valid: int) -> Tensor:
    """[4, N] float32: maximum, Σ exp(z − maximum), z at the target, Σ z of the first `num_valid` columns.

    Args:
        logits: [N, columns] of this rank.
        targets: [N] int64, a column of this rank; outside 0..num_valid−1 for those of other ranks.
    """
    rows = readable_rows(logits)
    statistics = torch.empty(4, len(rows), dtype=torch.float32, device=logits.device)
    block = min(_BLOCK, next_power_of_two(max(1, num_valid)))
    if len(rows):
        with on_device_of(logits):
            _statistics_kernel[(len(rows),)](
                rows, targets.contiguous(), statistics, rows.stride(0), len(rows), num_valid,
                BLOCK=block, num_warps=8, **JOINT_ROUNDINGS,
            )  # fmt: skip
    return statistics


def shard_gradient(
    logits: Tensor, targets: Tensor, num_valid: int, top: Tensor, log_sum: Tensor, valid: Tensor,
    target_weight: float, uniform_weight: float,
) -> Tensor:  # fmt: skip
    """exp(z − top − log_sum) − uniform_weight − target_weight · [column = target]; [N, columns] in logits' dtype.

    Exactly 0 in rows that are not valid, and in columns from `num_valid` on, whatever the logits there.

    Args:
        top, log_sum: [N] float32, of all ranks: lse(z) = top + log_sum.
        valid: [N] bool.
    """
    rows = readable_rows(logits)
    num_rows, width = rows.shape
    gradient = torch.empty(rows.shape, dtype=logits.dtype, device=logits.device)
    block = min(_BLOCK, next_power_of_two(max(1, width)))
    if gradient.numel():
        with on_device_of(logits):
            _gradient_kernel[(num_rows, ceil_div(width, block))](
                rows, targets.contiguous(), top.contiguous(), log_sum.contiguous(), valid.contiguous(), gradient,
                rows.stride(0), num_valid, width, target_weight, uniform_weight,
                BLOCK=block, num_warps=8, **SEPARATE_ROUNDINGS,
            )  # fmt: skip
    return gradient


@triton.jit
def _statistics_kernel(logits, targets, statistics, stride, num_rows, num_valid, BLOCK: tl.constexpr):
    """One row a program, in chunks: the sum is scaled anew whenever the maximum grows (Milakov, arXiv:1805.02867)."""
    row = tl.program_id(0).to(tl.int64)
    maximum = tl.full([], _LOWEST, dtype=tl.float32)  # finite, so that a rank without columns makes no NaN
    total_exponential = tl.zeros([], dtype=tl.float32)
    total = tl.zeros([], dtype=tl.float32)
    for start in range(0, num_valid, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_valid
        z = tl.load(logits + row * stride + columns, mask=inside, other=0).to(tl.float32)
        total += tl.sum(z, axis=0)
        z = tl.where(inside, z, float("-inf"))
        higher = tl.maximum(maximum, tl.max(z, axis=0))
        total_exponential = total_exponential * tl.exp(maximum - higher) + tl.sum(tl.exp(z - higher), axis=0)
        maximum = higher
    target = tl.load(targets + row)
    owned = (target >= 0) & (target < num_valid)
    target_logit = tl.load(logits + row * stride + target, mask=owned, other=0).to(tl.float32)
    tl.store(statistics + row, maximum)
    tl.store(statistics + num_rows + row, total_exponential)
    tl.store(statistics + 2 * num_rows + row, target_logit)
    tl.store(statistics + 3 * num_rows + row, total)


@triton.jit
def _gradient_kernel(
    logits, targets, tops, log_sums, valid, gradient, stride, num_valid, width, target_weight, uniform_weight,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < num_valid
    z = tl.load(logits + row * stride + columns, mask=real, other=0).to(tl.float32)
    probability = tl.exp(z - tl.load(tops + row) - tl.load(log_sums + row))
    value = probability - uniform_weight - tl.where(columns == tl.load(targets + row), target_weight, 0.0)
    value = tl.where(real & (tl.load(valid + row) != 0), value, 0.0)
    tl.store(gradient + row * width + columns, value.to(gradient.dtype.element_ty), mask=columns < width)
