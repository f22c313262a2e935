"""The model that is measured."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launch.measurement.model_facts import config_of, facts_of, text_of_config

if TYPE_CHECKING:
    from tp.config import ModelConfig


@dataclass(frozen=True)
class Subject:
    """A checkpoint, or a configuration whose weights are drawn at random.

    Attributes:
        name: without the directories that lead to it.
        source: what contestants are told, see `launch.measurement.peers.task.Task`.
        weights: "checkpoint" or "random".
    """

    name: str
    source: str
    config: ModelConfig
    weights: str

    @classmethod
    def of_checkpoint(cls, source: str) -> Subject:
        """Reads its configuration, no weights.

        Raises:
            CheckpointError, ConfigError: there is no such model, or not one that can be run.
        """
        return cls(Path(source).name, source, config_of(source), "checkpoint")

    @classmethod
    def of_config(cls, path: Path) -> Subject:
        """Of a config.json.

        Raises:
            RequestError: it cannot be read. ConfigError: it is not supported.
        """
        from launch.training_setup import read_config

        config = read_config(path)
        return cls(f"{path.resolve().parent.name}/{path.name}", text_of_config(config), config, "random")

    @property
    def digest(self) -> str:
        """Of the configuration: alike for models of the same sizes."""
        return hashlib.sha256(json.dumps(asdict(self.config), sort_keys=True).encode()).hexdigest()[:16]

    def step_bytes(self, dtype: str) -> int:
        """Bytes of weights that a decode step reads."""
        return facts_of(self.config, dtype).step_bytes
