"""Files that the command writes: looked at before anything is loaded, and complete or not there at all."""

from __future__ import annotations

import os
from pathlib import Path

from tp.errors import RequestError


def check_file(option: str, path: Path) -> None:
    """Refuses a file that could not be written later.

    Raises:
        RequestError: naming the option and the reason.
    """
    if path.exists() and not path.is_file():
        raise RequestError(f"{option} {path} is not a file: name one that may be written")
    if not path.parent.is_dir():
        raise RequestError(f"{option} {path} cannot be written: there is no directory {path.parent}")
    _try(option, path)


def check_directory(option: str, path: Path) -> None:
    """Makes the directory where it is not there yet, and refuses one that could not be written to.

    Raises:
        RequestError: naming the option and the reason.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{option} {path} cannot be made: {error.strerror or error}") from error
    _try(option, path / "file")


def write(option: str, path: Path, content: bytes) -> None:
    """Puts the content in place by one rename.

    Raises:
        RequestError: naming the option and the reason.
    """
    unfinished = _unfinished(path)
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise RequestError(f"{option} {path} cannot be written: {error.strerror or error}") from error


def _try(option: str, path: Path) -> None:
    try:
        _unfinished(path).touch()
        _unfinished(path).unlink(missing_ok=True)  # another rank may have tried it too
    except OSError as error:
        raise RequestError(f"{option} {path} cannot be written: {error.strerror or error}") from error


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.unfinished")
