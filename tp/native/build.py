"""Builds the C++ sources for this machine's CPU: `python -m tp.native.build`.

What is built is kept in the user's cache directory, under a name that says what it was built from and for, so that
changed sources or another CPU never meet an old library. It says nothing of the compiler, which is not looked for where
the library is opened: to build with another one, remove the old file.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tp.cache_directory import cache_directory
from tp.errors import BuildError, TensorParallelError

SOURCES = Path(__file__).parent / "src"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno")


def library_path() -> Path:
    """Where the library for these sources and this CPU lies, once it is built."""
    return cache_directory() / "native" / f"libtp_native-{_key()}.so"


def build() -> Path:
    """Compiles the library, unless it is there already.

    Raises:
        BuildError: no compiler, one that fails, or a cache directory that cannot be written.
    """
    path = library_path()
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            made = Path(directory) / path.name
            _compile(made)
            os.replace(made, path)  # whole or not at all, whoever else builds at the same time
    except OSError as error:
        raise BuildError(f"{path.parent} cannot be written ({error.strerror or error}): set XDG_CACHE_HOME") from error
    return path


def _compile(to: Path) -> None:
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    if compiler is None:
        raise BuildError("there is no C++ compiler: install g++, or set CXX")
    sources = sorted(str(path) for path in SOURCES.glob("*.cpp"))
    try:
        ended = subprocess.run([*compiler.split(), *FLAGS, *sources, "-o", str(to)], capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{compiler} cannot be run: {error.strerror or error}") from error
    if ended.returncode != 0:
        raise BuildError(f"{compiler} failed with status {ended.returncode}: {ended.stderr.strip()[:400]}")


def _key() -> str:
    digest = hashlib.sha256(" ".join((*FLAGS, _cpu())).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _cpu() -> str:
    """What tells one CPU from another that could not run its code."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")


def main() -> int:
    """Builds, and prints where the library lies."""
    try:
        path = build()
    except TensorParallelError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
