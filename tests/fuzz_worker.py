"""A process that reads damaged inputs under limits: `fuzz_worker.py DIRECTORY FIRST COUNT TARGET...`.

Prints a JSON object a line: {"target", "seed"} before each input, so that a crash or a hang names its input, and at the
end of each target what came of all. An input breaks a promise where it is neither read to the right values nor refused
by a typed error of a few printable lines, takes longer than `SECONDS`, or more memory than `allowed_bytes`.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

SECONDS = 5
"""For one input, on a busy machine; most take milliseconds."""
FREE_BYTES = 64 * 2**20
"""That any input may take: a tiny model, a library's own tables."""
BYTES_A_BYTE = 40
"""That each byte of an input may take beyond that: a byte of JSON may become an object of Python."""
LONGEST_MESSAGE = 2000
_OUT = os.dup(1)


class TooSlowError(BaseException):
    """An input took more than `SECONDS`; no `Exception`, so that nothing on the way takes it for its own."""


def main() -> None:
    from fuzz_targets import TARGETS

    directory, first, count = Path(sys.argv[1]).resolve(), int(sys.argv[2]), int(sys.argv[3])
    os.chdir(directory)  # commands make the directories that they are told to
    os.dup2(2, 1)  # what commands print is none of our records
    signal.signal(signal.SIGALRM, _too_slow)
    for name in sys.argv[4:]:
        place = directory / name
        place.mkdir()
        target = TARGETS[name](place)
        for warm_up in range(3):  # lazy imports
            _outcome(target, name, -1 - warm_up)
        limit = _memory()["VmSize"] + 2 * 2**30
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        results: dict[str, Any] = {"target": name, "loaded": 0, "refused": 0, "broken": [], "seconds": 0.0, "bytes": 0}
        for seed in range(first, first + count):
            _tell({"target": name, "seed": seed})
            _note(results, seed, *_outcome(target, name, seed))
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_AS)[1]))
        _tell(results)


def _outcome(target: Any, name: str, seed: int) -> tuple[str, str, float, int]:
    """(loaded, refused or broken; what was said; seconds; bytes of memory beyond those before)."""
    from tp.errors import TensorParallelError

    Path("/proc/self/clear_refs").write_text("5")  # the highest resident size is counted from here
    before, began = _memory()["VmRSS"], time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        target.attempt(random.Random(f"{name} {seed}"))
        kind, said = "loaded", ""
    except TensorParallelError as error:
        kind, said = "refused", str(error)
        if len(said) > LONGEST_MESSAGE or said.count("\n") > 1 or not said.replace("\n", "").isprintable():
            kind, said = "broken", f"a message of {len(said)} characters: {said[:200]!r}"
    except BaseException:
        kind, said = "broken", traceback.format_exc()[-3000:]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return kind, said, time.perf_counter() - began, _memory()["VmHWM"] - before


def _note(results: dict[str, Any], seed: int, kind: str, said: str, seconds: float, nbytes: int) -> None:
    if nbytes > FREE_BYTES + BYTES_A_BYTE * LARGEST_INPUT:
        kind, said = "broken", f"took {nbytes} bytes"
    if kind == "broken":
        results["broken"].append([seed, said])
    else:
        results[kind] += 1
    results["seconds"], results["bytes"] = max(results["seconds"], seconds), max(results["bytes"], nbytes)


LARGEST_INPUT = 2**20
"""Bytes; the inputs are smaller."""


def _memory() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.startswith("Vm")}


def _too_slow(*_: object) -> None:
    raise TooSlowError(f"took more than {SECONDS} s")


def _tell(record: dict[str, Any]) -> None:
    os.write(_OUT, json.dumps(record).encode() + b"\n")


if __name__ == "__main__":
    main()
