"""Of each row of logits, what a greedy choice and log-probabilities need: the highest value, where it is, Σ exp."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tp.native.library import ADDRESS, INTEGER, THREADS, NativeFunction
from tp.native.operation import NativeOperation

NAME = "argmax_and_sum_exp"
"""For `tp.choice`."""
LOWEST = torch.finfo(torch.float32).min
"""The highest of no values: finite, since −inf − (−inf) is not a number."""
_NATIVE = NativeOperation(NAME, "tp_argmax_and_sum_exp", ADDRESS, *(INTEGER,) * 3, *(ADDRESS,) * 3, THREADS)


@dataclass(frozen=True)
class ArgmaxAndSumExp:
    """Of R rows, each [R, 1].

    Attributes:
        columns: int64, where the highest value is; of equal ones the first.
        highest: float32; `LOWEST` where a row has no column.
        sum_exp: float32, Σ exp(x − highest); not finite where a value of the row is not.
    """

    columns: Tensor
    highest: Tensor
    sum_exp: Tensor


def argmax_and_sum_exp(logits: Tensor) -> ArgmaxAndSumExp:
    """Both of every row: in C++ over float32 or bfloat16 rows on a CPU, which sums up in another order.

    Args:
        logits: [R, K], any floating dtype; K may be 0.
    """
    if logits.is_cpu and logits.stride(1) == 1 and (native := _NATIVE.for_dtype(logits.dtype)) is not None:
        return _native_argmax_and_sum_exp(native, logits)
    return plain_argmax_and_sum_exp(logits)


def plain_argmax_and_sum_exp(logits: Tensor) -> ArgmaxAndSumExp:
    """`argmax_and_sum_exp` in torch operations."""
    values = logits.float()
    if not values.shape[1]:
        none = values.new_zeros(len(values), 1)
        return ArgmaxAndSumExp(none.long(), torch.full_like(none, LOWEST), none)
    columns = values.argmax(-1, keepdim=True)  # the first of equal values, by its documentation
    lowest, highest = values.aminmax(dim=-1, keepdim=True)
    sum_exp = (values - highest).exp().sum(-1, keepdim=True)
    return ArgmaxAndSumExp(columns, highest, sum_exp + (lowest - lowest))  # −∞ alone does not show in exp


def _native_argmax_and_sum_exp(native: NativeFunction, logits: Tensor) -> ArgmaxAndSumExp:
    rows, width = logits.shape
    columns = logits.new_empty(rows, 1, dtype=torch.int64)
    highest, sum_exp = (logits.new_empty(rows, 1, dtype=torch.float32) for _ in range(2))
    native(
        logits.data_ptr(), logits.stride(0), rows, width, columns.data_ptr(), highest.data_ptr(), sum_exp.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return ArgmaxAndSumExp(columns, highest, sum_exp)
