"""Tiny models of every family whose dimensions are all different and odd-sized, and all of whose parameters matter.

transformers initialises biases to 0 and norms to 1, which hides faults: here every parameter is drawn at random.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch

from tp.config import ModelConfig
from tp.layers.parameter import named_parts
from tp.models import CausalLM
from tp.parallel import TensorParallelGroup

_EMBEDDING_SCALE = 0.1
"""Small beside what the layers write: a tied model would else repeat its last token for ever."""

Model = TypeVar("Model", bound=CausalLM)

TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": {
        "hidden_size": 42,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 75,
        "vocab_size": 97,
        "tie_word_embeddings": False,
        "rope_theta": 5000.0,
        "rms_norm_eps": 1e-5,
    },
    "qwen3": {
        "hidden_size": 30,
        "num_hidden_layers": 3,
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "head_dim": 14,
        "intermediate_size": 203,
        "vocab_size": 101,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "rms_norm_eps": 1e-6,
    },
    "llama": {
        "hidden_size": 45,
        "num_hidden_layers": 2,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "intermediate_size": 71,
        "vocab_size": 103,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mistral": {
        "hidden_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "intermediate_size": 67,
        "vocab_size": 89,
        "sliding_window": 7,
        "tie_word_embeddings": False,
    },
}

ROPE_PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 3000.0},
    "linear": {"rope_type": "linear", "rope_theta": 3000.0, "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 3000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 3000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 3000.0, "factor": 4.0, "original_max_position_embeddings": 16},
}


def hub_config(family: str, **overrides: Any) -> dict[str, Any]:
    """The content of a config.json of a tiny model of the family."""
    return (
        {"model_type": family, "max_position_embeddings": 128, "eos_token_id": None} | TINY_CONFIGS[family] | overrides
    )


def transformers_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A transformers model with every parameter drawn at random, in float32 and eval mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = hub_config(family, **overrides)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * (_EMBEDDING_SCALE if "embed" in name else 1.3 * parameter.shape[1] ** -0.5))
    return model


def write_checkpoint(directory: Path, family: str = "qwen2", seed: int = 0, **overrides: Any) -> Path:
    """Saves such a model as a Hub directory."""
    transformers_model(family, seed, **overrides).save_pretrained(directory)
    return directory


def parallel_model(
    config: dict[str, Any] | ModelConfig,
    weights: dict[str, torch.Tensor],
    group: TensorParallelGroup,
    dtype: torch.dtype = torch.float32,
    model_class: type[Model] = CausalLM,
) -> Model:
    """This rank's share of a model with the given whole Hub tensors, cut by the parts of each parameter."""
    config = config if isinstance(config, ModelConfig) else ModelConfig.from_hf(config)
    model = model_class(config, group, dtype=dtype)
    with torch.no_grad():
        for parameter in named_parts(model):
            for part in parameter.parts:
                whole = weights[part.name].to(parameter.tensor.device)
                parameter.slice_of(part).copy_(whole.narrow(part.dim, part.global_start, part.length))
    return model.eval()
