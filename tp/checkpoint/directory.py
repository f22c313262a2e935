"""A directory in the Hub's layout: its JSON files, and which safetensors files hold the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tp.checkpoint.safetensors_source import SafetensorsSource
from tp.config_checks import LARGEST_COUNT
from tp.errors import CheckpointError
from tp.json_objects import read_object

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LONGEST_NAME = 255
"""Of a file, in bytes; asking after a longer one is an error of the operating system."""
FORMATS_READ = "only safetensors and GGUF are read"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: absent, unreadable, or no JSON object.
    """
    return read_object(path, CheckpointError)


def read_config(directory: Path) -> dict[str, Any]:
    """The content of config.json.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    if not (directory / CONFIG).is_file():
        raise CheckpointError(f"{directory} is not a checkpoint: it has no {CONFIG} ({FORMATS_READ})")
    return read_json(directory / CONFIG)


def generation_eos_token_ids(directory: Path) -> tuple[int, ...] | None:
    """End-of-sequence ids of generation_config.json; None where the file or the field is absent.

    Raises:
        CheckpointError: the field is neither an id nor a list of ids.
    """
    path = directory / GENERATION_CONFIG
    value = read_json(path).get("eos_token_id") if path.exists() else None
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < LARGEST_COUNT for token in ids):
        raise CheckpointError(f"{path}: eos_token_id is {value!r}, neither a token id nor a list of them")
    return tuple(ids)


def open_weights(directory: Path) -> SafetensorsSource:
    """The tensors of a directory, from its one safetensors file or the files that its index names.

    Every file that is named must be there, and hold what the index says, before anything else happens.

    Raises:
        CheckpointError: no weights in a format that is read, an index that does not fit its files, a damaged file.
    """
    if (directory / SINGLE_FILE).is_file():
        return SafetensorsSource([directory / SINGLE_FILE])
    if (directory / INDEX).is_file():
        return _open_indexed(directory)
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return SafetensorsSource(found)
    if found:
        raise CheckpointError(f"{directory} has {len(found)} safetensors files and no {INDEX} that says which to read")
    raise CheckpointError(f"{directory} has no weights: {_instead(directory)}{FORMATS_READ}")


def files_named(index: Mapping[str, Any], path: Path) -> dict[str, str]:
    """The file of each tensor that an index names.

    Raises:
        CheckpointError: the index has no such table, or names something that is not a plain safetensors file name.
    """
    table = index.get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{path} has no weight_map that names the files of tensors")
    for tensor, name in table.items():
        plain = isinstance(name, str) and Path(name).name == name and "\\" not in name
        short = plain and len(name.encode(errors="surrogatepass")) <= LONGEST_NAME
        if not short or not name.endswith(".safetensors"):
            raise CheckpointError(f"{path} names {name!r} for {tensor}: not a plain safetensors file of its directory")
    return table


def _open_indexed(directory: Path) -> SafetensorsSource:
    table = files_named(read_json(directory / INDEX), directory / INDEX)
    paths = [directory / name for name in sorted(set(table.values()))]
    for path in paths:
        if not path.is_file():
            raise CheckpointError(f"{directory / INDEX} names {path.name}, which is not there: fetch it again")
        _check_inside(directory, path)
    source = SafetensorsSource(paths)
    for name, file_name in table.items():
        if name not in source.tensors or source.file_of(name) != file_name:
            raise CheckpointError(f"{directory / INDEX} says that {name} is in {file_name}, which does not hold it")
    return source


def _check_inside(directory: Path, path: Path) -> None:
    """Refuses a link out of the directory, except into the store of the Hub's cache (…/blobs beside …/snapshots)."""
    root, target = directory.resolve(), path.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(place) for place in allowed):
        raise CheckpointError(f"{path} is a link to {target}, outside the checkpoint: copy the file there instead")


def _instead(directory: Path) -> str:
    """What is there in place of weights that are read."""
    suffixes = {
        ".bin": "PyTorch pickles",
        ".pt": "PyTorch pickles",
        ".pth": "PyTorch pickles",
        ".h5": "TensorFlow files",
    }
    for path in sorted(directory.iterdir()):
        if path.suffix == ".gguf":
            return f"name the GGUF file itself ({path.name}); "
        if path.suffix in suffixes:
            return f"it has {suffixes[path.suffix]} ({path.name}), but "
    return ""
