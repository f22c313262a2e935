"""Records what the C++ library is called for, and does it again without Python; see tp/native/src/tape.h."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tp.native.library import ADDRESS, INTEGER, NativeFunction, native_function

POSITION = ctypes.POINTER(INTEGER)


class Tape:
    """Calls with fixed addresses and sizes, which must stay valid as long as the tape is replayed."""

    def __init__(self) -> None:
        self._tape = _required("tp_tape_new", result=ADDRESS)()
        self._record = _required("tp_tape_record", ADDRESS)
        self._replay = _required("tp_tape_replay", ADDRESS, POSITION, result=ctypes.c_int)
        self._length = 0
        weakref.finalize(self, _required("tp_tape_delete", ADDRESS), self._tape)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Notes every call that this thread makes in the block; the calls are made as well."""
        self._record(self._tape)
        try:
            yield
        finally:
            self._record(None)
        self._length = _required("tp_tape_size", ADDRESS, result=INTEGER)(self._tape)

    def __len__(self) -> int:
        return self._length

    def replay(self, complete: Callable[..., None]) -> None:
        """Makes all calls again, in their order.

        Args:
            complete: calls a function with its arguments, which gives the status of the collective that it ended with,
                or 0; then completes that collective, or raises.
        """
        position = INTEGER()
        while position.value < self._length:
            complete(self._replay, self._tape, ctypes.byref(position))


def _required(name: str, *argument_types: Any, result: Any = None) -> NativeFunction:
    function = native_function(name, *argument_types, result=result)
    assert function is not None, "a tape needs the C++ library"
    return function
