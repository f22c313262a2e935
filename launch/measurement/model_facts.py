"""What must be known of a model to ask for its tokens and to say how fast its weights were read."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass


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
    from tp.checkpoint import open_checkpoint, weight_bytes
    from tp.generation.loading import as_dtype
    from tp.models import CausalLM
    from tp.parallel.group import TensorParallelGroup

    group = TensorParallelGroup.alone()
    with closing(open_checkpoint(path, group)) as checkpoint:
        config = checkpoint.config
    model = CausalLM(config, group, dtype=as_dtype(dtype), device="meta")
    looked_up = 0 if config.tie_word_embeddings else weight_bytes(model.model.embed_tokens)
    return ModelFacts(config.vocab_size, weight_bytes(model) - looked_up)
