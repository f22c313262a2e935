"""What must be known of a model to ask for its tokens and to say how fast its weights were read."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tp.config import ModelConfig


@dataclass(frozen=True)
class ModelFacts:
    """Of the whole model, however it is split.

    Attributes:
        vocab_size: ids are below it.
        step_bytes: bytes of weights that one decode step reads: all of them, but an embedding that is not the LM head
            too, since a step looks up a few rows of it.
    """

    vocab_size: int
    step_bytes: int


def model_facts(path: str, dtype: str) -> ModelFacts:
    """The facts of a checkpoint, without reading its weights.

    Raises:
        CheckpointError: no checkpoint there, or one that is damaged or incomplete.
        ConfigError: an unsupported model or dtype.
    """
    return facts_of(config_of(path), dtype)


def config_of(model: str) -> ModelConfig:
    """The configuration of a checkpoint, without reading its weights; or the one that `text_of_config` wrote down.

    Raises:
        CheckpointError: no checkpoint there, or one that is damaged or incomplete.
        ConfigError: an unsupported model.
    """
    from tp.checkpoint import open_checkpoint
    from tp.config import ModelConfig
    from tp.parallel.group import TensorParallelGroup
    from tp.rope_config import RopeConfig

    if is_config_alone(model):
        fields = json.loads(model)
        windows, ends = (tuple(fields[name]) for name in ("sliding_windows", "eos_token_ids"))
        rope = RopeConfig(**fields["rope"])
        return ModelConfig(**{**fields, "rope": rope, "sliding_windows": windows, "eos_token_ids": ends})
    with closing(open_checkpoint(model, TensorParallelGroup.alone())) as checkpoint:
        return checkpoint.config


def text_of_config(config: ModelConfig) -> str:
    """What stands in a model's place for one of this configuration, filled with random weights."""
    return json.dumps(asdict(config))


def is_config_alone(model: str) -> bool:
    """Whether a model is given by `text_of_config`."""
    return model.startswith("{")


def facts_of(config: ModelConfig, dtype: str) -> ModelFacts:
    """The facts of any model.

    Raises:
        ConfigError: an unsupported dtype.
    """
    from tp.checkpoint import weight_bytes
    from tp.generation.loading import as_dtype
    from tp.models import CausalLM

    model = CausalLM(config, dtype=as_dtype(dtype), device="meta")
    looked_up = 0 if config.tie_word_embeddings else weight_bytes(model.model.embed_tokens)
    return ModelFacts(config.vocab_size, weight_bytes(model) - looked_up)
