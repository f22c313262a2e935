"""Triton's interpreter with the bfloat16 of compiled kernels, and without copies of what is in place already.

The interpreter keeps bfloat16 as 16-bit integers. Its cast from float32 cuts the low bits off where a GPU rounds to
nearest, ties to even; its matrix product multiplies the integers. And it copies whole storages back to where they
came from, which for tensors of the CPU is the same place: it would fill the storages of gigabytes that some tests
never touch. Up to Triton 3.6 it takes int() of an array of one element, which NumPy 2.4 refuses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Repairs them all, in this process."""
    cast, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot
    patch_tensor = interpreter._patch_lang_tensor

    def convert_float(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            return _nearest_bfloat16(data)
        return cast(data, source, target, rounding_mode)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _widened(a), _widened(b), *rest)

    def patch_lang_tensor(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch_lang_tensor
    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
    np.seterr(all="ignore")  # lanes past the end of a row compute what nobody stores: 1/0, 0 · inf


def _nearest_bfloat16(data: Any) -> Any:
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)


def _widened(operand: Any) -> Any:
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    data = interpreter._convert_float(operand.data, tl.bfloat16, tl.float32, None).view(np.float32)
    return interpreter.TensorHandle(data, tl.float32)
