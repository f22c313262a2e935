"""Opens the library that `tp.native.build` made."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from tp.choice import warn_once
from tp.native.build import library_path

NAME = "native"
"""Of all C++ kernels together, for `tp.choice`."""
ADDRESS, INTEGER, FLOAT, THREADS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
NativeFunction = Callable[..., Any]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library for this CPU, whatever is switched off; None, with one warning, where it was not built."""
    path = library_path()
    if not path.exists():
        warn_once(NAME, "the C++ kernels are not built: run `python -m tp.native.build` (it needs a C++ compiler)")
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        warn_once(NAME, f"{path} cannot be opened: {error}")
        return None


def native_function(name: str, *argument_types: Any, result: Any = None) -> NativeFunction | None:
    """A function of the library with its C types; None where there is no library.

    The interpreter's lock is released while it runs.
    """
    opened = library()
    if opened is None:
        return None
    function: NativeFunction = opened[name]
    function.argtypes, function.restype = argument_types, result  # type: ignore[attr-defined]
    return function
