"""Tensors as the C++ library takes them: by address, elements side by side, some of them absent."""

from __future__ import annotations

from torch import Tensor


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """The tensor, its elements side by side; None where there is none."""
    return None if tensor is None else tensor.contiguous()


def address(tensor: Tensor | None) -> int | None:
    """Where the tensor begins, which must live as long as that is used; None, C++'s null, where there is none."""
    return None if tensor is None else tensor.data_ptr()


def weight_for(x: Tensor, weight: Tensor) -> Tensor:
    """A norm's weight, contiguous and in the dtype of what it multiplies."""
    return weight.contiguous() if weight.dtype == x.dtype else weight.to(x.dtype).contiguous()
