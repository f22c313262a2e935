"""Small models with random weights, whose times tell what a machine does: large layers, many small ones, hardly any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.measurement.cases import Case
from tp.config import ModelConfig
from tp.rope_config import RopeConfig


def _config(**sizes: Any) -> ModelConfig:
    return ModelConfig(
        model_type="llama", max_position_embeddings=2048, rope=RopeConfig(), tie_word_embeddings=True, **sizes
    )


CONFIGS: Mapping[str, ModelConfig] = {
    "large": _config(
        hidden_size=1536,
        num_layers=6,
        num_attention_heads=24,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=6144,
        vocab_size=65536,
    ),
    "wide": _config(
        hidden_size=1024,
        num_layers=10,
        num_attention_heads=16,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=4096,
        vocab_size=32768,
    ),
    "deep": _config(
        hidden_size=512,
        num_layers=36,
        num_attention_heads=8,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=98304,
    ),
    "thin": _config(
        hidden_size=128,
        num_layers=48,
        num_attention_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=256,
        vocab_size=1024,
    ),
}
"""All but the thin one are read from memory; of that one, nothing but the fixed costs is left."""

_ROWS = (
    *(Case("decode", batch, 16, 24) for batch in (1, 2, 3, 4, 8, 16)),
    *(Case("prefill", 1, tokens, 1) for tokens in (16, 64, 128, 512)),
)

CASES: Mapping[str, tuple[Case, ...]] = {
    "large": _ROWS,
    "wide": (*_ROWS, Case("decode", 1, 1024, 16)),
    "deep": (
        Case("decode", 1, 16, 24),
        Case("decode", 1, 1024, 16),
        Case("decode", 8, 16, 24),
        *(Case("prefill", 1, tokens, 1) for tokens in (16, 64, 128, 512)),
    ),
    "thin": (
        Case("decode", 1, 16, 48),
        Case("decode", 8, 16, 24),
        *(Case("prefill", 1, tokens, 1) for tokens in (16, 128, 512)),
    ),
}
"""What is timed of each. The long prompt before a decode is a prefill of two chunks, and is timed too."""
