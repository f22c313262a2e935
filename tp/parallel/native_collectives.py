"""The C functions of the shared-memory collectives (tp/native/src/communicator.cpp), with their types and numbers."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tp.native.library import ADDRESS, FLOAT, INTEGER, native_function

DONE, WAITING, MISMATCH, BUSY = range(4)
"""What a collective returns; see tp/native/src/communicator_endpoint.h."""
OPEN, CLOSED = range(2)
"""A rank's presence; it may also have given up; see tp/native/src/communicator_segment.h."""
OPERATIONS = (
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce_add_rms_norm", "reduce_scatter_add_rms_norm",
)  # fmt: skip
"""By the number that a rank announces."""
SUMMED = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip
"""By number, the dtypes that the C++ code can add."""
OTHER_DTYPE = len(SUMMED)
"""The number of any other dtype, whose elements are moved only."""
DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(SUMMED)}
SEEN = ctypes.c_int64 * 8
"""What `look` fills in: alive, published, presence, process, operation, dtype, elements, detail."""

_COUNT, _ENDPOINT = ctypes.c_int, ctypes.c_void_p


@dataclass(frozen=True)
class NativeCollectives:
    """The functions by name; the collectives return one of `DONE`, `WAITING`, `MISMATCH`, `BUSY`."""

    segment_bytes: Callable[..., int]
    attach: Callable[..., int | None]
    detach: Callable[..., None]
    resume: Callable[..., int]
    give_up: Callable[..., None]
    round: Callable[..., int]
    look: Callable[..., None]
    all_reduce: Callable[..., int]
    reduce_scatter: Callable[..., int]
    all_gather: Callable[..., int]
    broadcast: Callable[..., int]
    reduce_add_rms_norm: Callable[..., int]
    reduce_scatter_add_rms_norm: Callable[..., int]


@functools.cache
def native_collectives() -> NativeCollectives | None:
    """None, after a warning, where the library was not built."""
    fused = (_ENDPOINT, ADDRESS, ADDRESS, ADDRESS, ADDRESS, FLOAT, ADDRESS, ADDRESS)
    scattered = (_ENDPOINT, ADDRESS, ADDRESS, ADDRESS, INTEGER, ctypes.c_uint32, INTEGER)
    functions = {
        "segment_bytes": _function("segment_bytes", INTEGER, _COUNT, INTEGER),
        "attach": _function(
            "attach", _ENDPOINT, _COUNT, _COUNT, _COUNT, INTEGER, INTEGER, ctypes.POINTER(ctypes.c_int)
        ),
        "detach": _function("detach", None, _ENDPOINT),
        "resume": _function("resume", _COUNT, _ENDPOINT),
        "give_up": _function("give_up", None, _ENDPOINT),
        "round": _function("round", INTEGER, _ENDPOINT),
        "look": _function("look", None, _ENDPOINT, _COUNT, SEEN),
        "all_reduce": _function(
            "all_reduce", _COUNT, _ENDPOINT, ADDRESS, ADDRESS, INTEGER, ctypes.c_uint32, INTEGER, INTEGER
        ),
        "reduce_scatter": _function("reduce_scatter", _COUNT, *scattered),
        "all_gather": _function("all_gather", _COUNT, *scattered),
        "broadcast": _function(
            "broadcast", _COUNT, _ENDPOINT, ADDRESS, ADDRESS, INTEGER, INTEGER, ctypes.c_uint32, INTEGER
        ),
        "reduce_add_rms_norm": _function(
            "reduce_add_rms_norm", _COUNT, *fused, INTEGER, INTEGER, ctypes.c_uint32
        ),
        "reduce_scatter_add_rms_norm": _function(
            "reduce_scatter_add_rms_norm", _COUNT, *fused, ADDRESS, INTEGER, INTEGER, ctypes.c_uint32, INTEGER
        ),
    }  # fmt: skip
    if None in functions.values():
        return None
    return NativeCollectives(**functions)  # type: ignore[arg-type]


def _function(name: str, result: Any, *argument_types: Any) -> Callable[..., Any] | None:
    return native_function(f"tp_communicator_{name}", *argument_types, result=result)
