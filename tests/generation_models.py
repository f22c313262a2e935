"""Small models for the tests of generation: one that computes, one that follows a script, and a tokenizer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from tp.config import ModelConfig
from tp.generation import GenerationResult, LanguageModel
from tp.layers import KVCache, ShardedLogits, Step
from tp.models import initialise_parameters
from tp.parallel import TensorParallelGroup
from tp.rope_config import RopeConfig

VOCAB_SIZE = 97


def tiny_config(**overrides: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "model_type": "qwen2",
        "hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 128,
        "rope": RopeConfig(),
        "qkv_bias": True,
    }
    return ModelConfig(**(fields | overrides))


def tiny_model(group: TensorParallelGroup, config: dict[str, Any] | None = None, **options: Any) -> LanguageModel:
    """A model that computes, with weights that make its choices clear; `options` are those of `LanguageModel`."""
    model = LanguageModel(tiny_config(**(config or {})), group, **options)
    initialise_parameters(model, seed=0, std=0.4)
    return model


class ScriptedModel(LanguageModel):
    """After token i comes `script[i]` (else i + 1); what comes after that is its second choice."""

    script: dict[int, int]

    def next_token_logits(self, step: Step, cache: KVCache) -> ShardedLogits:
        whole = torch.zeros(len(step.sequences), self.config.vocab_size, device=self.group.device)
        for row, last in enumerate(step.token_ids[step.last_rows()].tolist()):
            first = self.script.get(last, (last + 1) % self.config.vocab_size)
            whole[row, first] = 20.0
            whole[row, self.script.get(first, (first + 1) % self.config.vocab_size)] = 10.0
        width = self.lm_head.weight.shape[0]
        local = torch.nn.functional.pad(whole, (0, width * self.group.size - self.config.vocab_size))
        return ShardedLogits(
            local[:, self.group.rank * width : (self.group.rank + 1) * width], self.group, self.config.vocab_size
        )

    def residual_stream(self, step: Step, cache: KVCache | None = None) -> Any:
        return None


def scripted_model(group: TensorParallelGroup, script: dict[int, int] | None = None, **options: Any) -> ScriptedModel:
    model = ScriptedModel(tiny_config(), group, **options)
    model.script = script or {}
    return model


class CharacterTokenizer:
    """Id i is the character after the i-th of printable ASCII: "A" is 33, "B" 34, …; the last id is no text."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}
    unk_token_id = None

    def encode(self, text: str) -> list[int]:
        return [ord(character) - 32 for character in text]

    def decode(self, ids: list[int], **options: Any) -> str:
        return "".join(chr(token_id + 32) for token_id in ids)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return chr(token_id + 32)

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[None]:
        return [None] * len(tokens)


def summary(result: GenerationResult) -> list[tuple[tuple[int, ...], str, str]]:
    """New ids, text and finish reason of each sequence."""
    return [(sequence.new_ids, sequence.text, sequence.finish_reason) for sequence in result.sequences]
