"""From what a user names, a path or a Hub id, to what is on this machine's disk."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from tp.checkpoint.directory import INDEX, SINGLE_FILE, files_named, read_json
from tp.checkpoint.hosts import ranks_on_this_host
from tp.checkpoint.together import work_together
from tp.errors import CheckpointError, first_line
from tp.parallel.group import TensorParallelGroup

SETTINGS_FILES = ("*.json", "tokenizer*", "*.model", "*.jinja", "merges.txt", "vocab.txt")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")


def resolve(name: str, group: TensorParallelGroup) -> Path:
    """The local directory or file that `name` means; a Hub id is fetched into the Hub's cache first.

    Of the ranks on one machine the lowest fetches, then the others find it in the cache. Raised on all ranks
    together.

    Raises:
        CheckpointError: nothing of that name, or it cannot be fetched.
    """
    path = Path(os.path.expanduser(name))
    found = group.communicator.all_gather_object(bool(name) and _exists(path))
    if all(found):
        return path
    if any(found):
        here, missing = found.index(True), found.index(False)
        raise CheckpointError(f"{name} exists for rank {here}, but not for rank {missing}: it must be on every machine")
    if not is_hub_id(name):
        raise CheckpointError(f"{name!r} is neither a file or directory nor a Hub id")
    fetches = group.rank == ranks_on_this_host(group)[0]
    work_together(group, lambda: _fetch(name, offline=False) if fetches else None)
    return group.agree(lambda: _fetch(name, offline=True))


def is_hub_id(name: str) -> bool:
    """Whether the Hub may have a model of that name, and no file is meant."""
    return bool(_HUB_ID.fullmatch(name)) and not name.endswith((".gguf", ".safetensors", ".json"))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long for a file
        return False


def _fetch(name: str, *, offline: bool) -> Path:
    """Settings first, which say which weights there are, then those weights: never pickles, never a second copy."""
    directory = snapshot(name, SETTINGS_FILES, offline=offline)
    index = directory / INDEX
    weights = sorted(set(files_named(read_json(index), index).values())) if index.is_file() else [SINGLE_FILE]
    return snapshot(name, [*SETTINGS_FILES, *weights], offline=offline)


def snapshot(name: str, patterns: Sequence[str], *, offline: bool) -> Path:
    """The files of a Hub model's root that match a pattern, in the Hub's cache; with `offline` only if they are there.

    Raises:
        CheckpointError: no such model, or it cannot be fetched.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(
            snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=["*/*"], local_files_only=offline)
        )
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointError(f"{name!r} is not a path here, and the Hub has no model of that name") from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{name!r} is not a path here, not in the Hub's cache, and the Hub cannot be reached: "
            "give a local directory"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise CheckpointError(f"{name!r} cannot be fetched from the Hub: {first_line(error)}") from error
