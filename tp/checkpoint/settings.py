"""The configuration of a model that is only to be looked at: no weights are read or fetched."""

from __future__ import annotations

import os
from pathlib import Path

from tp.checkpoint.directory import CONFIG, read_config, read_json
from tp.checkpoint.hub import is_hub_id, snapshot
from tp.config import ModelConfig
from tp.errors import CheckpointError

GGUF_DTYPE = "bfloat16"
"""What `auto` means for a GGUF file."""


def read_model_config(name: str) -> ModelConfig:
    """Of a directory in the Hub's layout, a config.json, a GGUF file (its header) or a Hub id (its config.json).

    Raises:
        CheckpointError: nothing there, or nothing that can be read. ConfigError: a model that is not supported.
    """
    path = Path(os.path.expanduser(name))
    try:
        there = bool(name) and path.exists()
    except OSError:  # a name that is too long for a file
        there = False
    if not there:
        return ModelConfig.from_hf(read_config(_fetched(name)))
    if path.is_dir():
        return ModelConfig.from_hf(read_config(path))
    if path.suffix == ".json":
        return ModelConfig.from_hf(read_json(path))
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} is one file of a checkpoint: give the directory that holds it, or a config.json")
    return _of_gguf(path)


def _of_gguf(path: Path) -> ModelConfig:
    from dataclasses import replace

    from tp.checkpoint.gguf_config import hub_config
    from tp.checkpoint.gguf_header import GgufHeader
    from tp.checkpoint.gguf_rope import read_rope_factors

    header = GgufHeader.read(path)
    config = ModelConfig.from_hf(hub_config(header, read_rope_factors(header)))
    return replace(config, dtype=GGUF_DTYPE)


def _fetched(name: str) -> Path:
    if not is_hub_id(name):
        raise CheckpointError(f"{name!r} is neither a file or directory nor a Hub id")
    return snapshot(name, (CONFIG,), offline=False)
