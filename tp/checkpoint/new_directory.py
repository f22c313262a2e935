"""A directory that appears complete, by one rename, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tp.checkpoint.together import work_together
from tp.errors import CheckpointError
from tp.parallel.group import TensorParallelGroup


@contextmanager
def new_directory(target: Path, group: TensorParallelGroup, num_bytes: int) -> Iterator[Path]:
    """Within the block, files go to a directory beside `target`, which gets that name at the block's end.

    Every rank enters; rank 0 makes and names the directory, and removes it if the block raises on it.

    Args:
        target: must not exist, or be empty.
        num_bytes: that are going to be written; checked against the disk's free space.

    Raises:
        CheckpointError: the directory is in use, there is too little space, or writing failed; on all ranks together.
    """
    writes = group.rank == 0
    partial = group.agree(lambda: _begin(target, num_bytes) if writes else target)
    try:
        yield partial
        work_together(group, lambda: _finish(partial, target) if writes else None)  # a slow disk may take minutes
    except BaseException:
        if writes:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _begin(target: Path, num_bytes: int) -> Path:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not an empty directory: choose another, nothing was written")
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        free = shutil.disk_usage(partial).free
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror}") from error
    if free < num_bytes:
        partial.rmdir()
        raise CheckpointError(f"{target} needs {num_bytes} bytes, {free} are free on that disk")
    return partial


def _finish(partial: Path, target: Path) -> None:
    """Brings everything to the disk, then gives the directory its name."""
    try:
        for path in (*sorted(partial.rglob("*"), reverse=True), partial):
            _sync(path)
        partial.rename(target)
        _sync(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
