"""`python -m launch.measurement.reader`: reads a buffer of its own, as fast as one or more threads can.

The read is `memcmp` of the C library over the two halves of the buffer, which are equal: it takes in whole vector
registers from two places at a time, stores nothing, and lets go of Python's lock. It was faster than memchr and than
sums by torch or numpy. The buffer is in huge pages, where the system gives them, as the
engine's weights are.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from launch.measurement.serving import Line

PIECE_BYTES = 1 << 22
"""Of each half, what one call of memcmp reads, after which the clock is looked at: 0.2 to 1 ms."""
PAGE_BYTES = 4096


class Buffer:
    """Memory of two equal halves.

    Args:
        nbytes: more than all caches hold, and a multiple of twice `PIECE_BYTES`.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, nbytes, PAGE_BYTES):
            self._memory[start] = 1  # untouched, every page would be the same page of zeros
        self._first_half = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._second_half = self._first_half + nbytes // 2
        self._pieces = nbytes // 2 // PIECE_BYTES
        self._compare = ctypes.CDLL(None).memcmp
        self._compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def read_until(self, deadline: float) -> float:
        """Reads round and round until that time of `perf_counter`; gives bytes a second."""
        began, pieces = time.perf_counter(), 0
        while (now := time.perf_counter()) < deadline or not pieces:
            offset = pieces % self._pieces * PIECE_BYTES
            self._compare(self._first_half + offset, self._second_half + offset, PIECE_BYTES)
            pieces += 1
        return 2 * pieces * PIECE_BYTES / (now - began)


def main() -> None:
    """Answers each request, of so many seconds, with the bytes a second of all threads together."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--bytes", type=int, required=True, help="of each thread's buffer")
    arguments = parser.parse_args()
    line = Line()
    buffers = [Buffer(arguments.bytes) for _ in range(arguments.threads)]
    with ThreadPoolExecutor(arguments.threads) as pool:
        line.ready()
        for text in line.requests():
            line.answer(_read(pool, buffers, float(text)))


def _read(pool: ThreadPoolExecutor, buffers: list[Buffer], seconds: float) -> Any:
    deadline = time.perf_counter() + seconds
    return sum(pool.map(lambda buffer: buffer.read_until(deadline), buffers))


if __name__ == "__main__":
    main()
