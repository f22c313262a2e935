"""Rows of a table by their indices, zeros for those that are elsewhere: of embeddings and of the LM head."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tp.kernels.int8_weight import Int8Weight
from tp.native.library import ADDRESS, INTEGER, NativeFunction
from tp.native.operation import NativeOperation

NAME = "embedding_lookup"
"""For `tp.choice`."""
_NATIVE = NativeOperation(NAME, "tp_embedding_lookup", ADDRESS, INTEGER, INTEGER, ADDRESS, INTEGER, INTEGER, ADDRESS)
_NATIVE_INT8 = NativeOperation(
    NAME, "tp_embedding_lookup_int8", ADDRESS, ADDRESS, INTEGER, INTEGER, ADDRESS, INTEGER, INTEGER, ADDRESS
)


def embedding_lookup(
    table: Tensor | Int8Weight, indices: Tensor, first: int = 0, num_rows: int | None = None
) -> Tensor:
    """y_i = table[indices_i − first] where that is one of its rows, else 0; differentiable in the table.

    Args:
        table: [rows, D], or more with padding at the end.
        indices: [N] int64.
        first: index of the table's first row.
        num_rows: how many of the table's rows are real; by default all.
    """
    num_rows = table.shape[0] if num_rows is None else num_rows
    if indices.is_cpu and indices.dtype == torch.int64 and indices.dim() == 1 and not torch.is_grad_enabled():
        if isinstance(table, Int8Weight):
            if (native := _NATIVE_INT8.for_dtype(table.dtype)) is not None:
                return _native_int8_lookup(native, table, indices.contiguous(), first, num_rows)
        elif (native := _NATIVE.for_any_dtype()) is not None and table.is_contiguous():
            return _native_lookup(native, table, indices.contiguous(), first, num_rows)
    own = indices - first
    held = (own >= 0) & (own < num_rows)
    own = own.where(held, 0)
    found = table.rows(own) if isinstance(table, Int8Weight) else functional.embedding(own, table)
    return found.where(held.unsqueeze(-1), 0)


def _native_lookup(native: NativeFunction, table: Tensor, indices: Tensor, first: int, num_rows: int) -> Tensor:
    y = table.new_empty(indices.shape[0], table.shape[1])
    row_bytes = table.shape[1] * table.element_size()
    native(table.data_ptr(), row_bytes, num_rows, indices.data_ptr(), first, indices.shape[0], y.data_ptr())
    return y


def _native_int8_lookup(
    native: NativeFunction, table: Int8Weight, indices: Tensor, first: int, num_rows: int
) -> Tensor:
    columns = table.shape[1]
    y = table.values.new_empty(indices.shape[0], columns, dtype=table.dtype)
    native(
        table.values.data_ptr(), table.scales.data_ptr(), columns, num_rows, indices.data_ptr(), first,
        indices.shape[0], y.data_ptr(),
    )  # fmt: skip
    return y
