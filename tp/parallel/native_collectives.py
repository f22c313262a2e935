"""The C functions of the shared-memory collectives (tp/native/src/communicator.cpp), with their types and numbers."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from tp.native.library import ADDRESS, FLOAT, INTEGER, NativeFunction, native_function

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
SEEN = ctypes.c_int64 * 4
"""What `look` fills in, besides an announcement: alive, published, presence, process."""

_COUNT, _ENDPOINT = ctypes.c_int, ctypes.c_void_p


class Announcement(ctypes.Structure):
    """A collective as a rank announces it to the others, with what must be equal on all of them.

    The struct of this name in tp/native/src/communicator_segment.h.

    Attributes:
        operation: index into `OPERATIONS`.
        dtype: see `DTYPE_NUMBERS`.
        detail: besides the dtype and the number of elements: the source of a broadcast, the columns of rows that are
            normed whole, else a digest of shapes and sizes.
    """

    operation: int
    dtype: int
    element_bytes: int
    elements: int
    detail: int
    _fields_ = (
        ("operation", ctypes.c_uint16), ("dtype", ctypes.c_uint16), ("element_bytes", ctypes.c_uint32),
        ("elements", ctypes.c_int64), ("detail", ctypes.c_int64),
    )  # fmt: skip

    def __str__(self) -> str:
        names = {number: str(dtype).removeprefix("torch.") + " " for dtype, number in DTYPE_NUMBERS.items()}
        operation = OPERATIONS[self.operation]
        source = f" from rank {self.detail}" if operation == "broadcast" else ""
        return f"{operation} of {self.elements} {names.get(self.dtype, '')}elements{source}"


@functools.lru_cache(maxsize=1024)
def announcement(operation: str, dtype: torch.dtype, shape: torch.Size, alike: Hashable) -> Announcement:
    """Of a collective over a tensor of this shape; kept, since steps repeat theirs.

    Args:
        alike: what must be equal on all ranks besides the dtype and the number of elements. An integer is announced as
            it is, anything else as its hash, which must not depend on the process.
    """
    number = DTYPE_NUMBERS.get(dtype, OTHER_DTYPE)
    return Announcement(OPERATIONS.index(operation), number, dtype.itemsize, shape.numel(), hash(alike))


class Counts(ctypes.Structure):
    """What an endpoint has done; it writes here as long as it is attached.

    The struct of this name in tp/native/src/communicator_endpoint.h.
    """

    calls: int
    bytes: int
    seconds: float
    _fields_ = (("calls", ctypes.c_int64), ("bytes", ctypes.c_int64), ("seconds", ctypes.c_double))


_ANNOUNCEMENT = ctypes.POINTER(Announcement)


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
    exchange = (_ENDPOINT, _ANNOUNCEMENT, ADDRESS, ADDRESS)
    fused = (_ENDPOINT, _ANNOUNCEMENT, ADDRESS, ADDRESS, ADDRESS, ADDRESS, FLOAT, ADDRESS, ADDRESS)
    functions = {
        "segment_bytes": _function("segment_bytes", INTEGER, _COUNT, INTEGER),
        "attach": _function(
            "attach", _ENDPOINT, _COUNT, _COUNT, _COUNT, INTEGER, INTEGER, ctypes.POINTER(Counts),
            ctypes.POINTER(ctypes.c_int),
        ),
        "detach": _function("detach", None, _ENDPOINT),
        "resume": _function("resume", _COUNT, _ENDPOINT),
        "give_up": _function("give_up", None, _ENDPOINT),
        "round": _function("round", INTEGER, _ENDPOINT),
        "look": _function("look", None, _ENDPOINT, _COUNT, SEEN, _ANNOUNCEMENT),
        "all_reduce": _function("all_reduce", _COUNT, *exchange),
        "reduce_scatter": _function("reduce_scatter", _COUNT, *exchange, ADDRESS),
        "all_gather": _function("all_gather", _COUNT, *exchange, ADDRESS),
        "broadcast": _function("broadcast", _COUNT, *exchange),
        "reduce_add_rms_norm": _function("reduce_add_rms_norm", _COUNT, *fused),
        "reduce_scatter_add_rms_norm": _function("reduce_scatter_add_rms_norm", _COUNT, *fused, ADDRESS, INTEGER),
    }  # fmt: skip
    if None in functions.values():
        return None
    return NativeCollectives(**functions)  # type: ignore[arg-type]


def _function(name: str, result: Any, *argument_types: Any) -> NativeFunction | None:
    return native_function(f"tp_communicator_{name}", *argument_types, result=result)
