"""An operation that the library has in C++, in a form for each of some dtypes, and what switches it off."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tp.choice import disabled
from tp.native.library import NAME as LIBRARY
from tp.native.library import NativeFunction, library, native_function

DTYPES = frozenset({torch.float32, torch.bfloat16})
"""What the library's kernels compute in."""


class NativeOperation:
    """Functions of the library that are named alike but for a dtype: `tp_rms_norm_bfloat16`, `tp_rms_norm_float32`."""

    def __init__(self, switch: str, symbol: str, *argument_types: Any) -> None:
        """Opens nothing yet.

        Args:
            switch: the operation's name for `tp.choice`, which is asked at every call.
            symbol: the functions' name, without the dtype.
            argument_types: of each of them.
        """
        self._switches = frozenset([switch, LIBRARY])
        self._symbol = symbol
        self._argument_types = argument_types
        self._function = functools.cache(self._look_up)

    def for_dtype(self, dtype: torch.dtype) -> NativeFunction | None:
        """The form for `dtype`; None where the library has none or was not built, or where it is switched off."""
        return self._function(dtype) if self._switches.isdisjoint(disabled()) else None

    def for_any_dtype(self) -> NativeFunction | None:
        """The only form of an operation that does not look into its elements; None as above."""
        return self._function(None) if self._switches.isdisjoint(disabled()) else None

    def _look_up(self, dtype: torch.dtype | None) -> NativeFunction | None:
        name = self._symbol if dtype is None else f"{self._symbol}_{dtype}".replace("torch.", "")
        return native_function(name, *self._argument_types) if hasattr(library(), name) else None
