"""The families of models that run: rows of a table, and the fields of Hub configs that say nothing of the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """How one architecture differs from the generic decoder.

    A trait is a constant, or the name of the config field that decides it.

    Attributes:
        own_fields: fields that the Hub does not know, with their defaults; named as in `ModelConfig`.
        config_class: the model type whose config class of transformers knows the others, where it is another.
    """

    architecture: str
    qkv_bias: bool | str
    attention_output_bias: bool | str
    mlp_bias: bool | str = False
    qk_norm: bool = False
    own_fields: Mapping[str, Any] = field(default_factory=dict)
    config_class: str | None = None


FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", "attention_bias", "attention_bias", mlp_bias="mlp_bias"),
    "mistral": Family("MistralForCausalLM", qkv_bias=False, attention_output_bias=False),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, attention_output_bias=False),
    "qwen3": Family("Qwen3ForCausalLM", "attention_bias", "attention_bias", qk_norm=True),
    "tp_decoder": Family(  # the decoder's own choices, for which the Hub has no one family
        "TPDecoderForCausalLM",
        "attention_bias",
        "attention_bias",
        mlp_bias="mlp_bias",
        own_fields={"norm_placement": "pre", "norm": "rms_norm", "gated_mlp": True},
        config_class="llama",
    ),
}

# Fields that are read, by `ModelConfig.from_hf` or on its way through transformers, of any family: not every family's
# config class lists them.
READ_FIELDS = frozenset(
    "model_type architectures dtype torch_dtype head_dim layer_types rope_theta rope_scaling".split()
)
# Fields of Hub configs that say nothing about the numbers that a decoder computes from its weights.
INERT_FIELDS = frozenset(
    "auto_map transformers_version use_cache unk_token_id sep_token_id cls_token_id pretraining_tp is_llama_config "
    "transformers.js_config max_window_layers".split()
)
# Fields that some Hub configs carry and that are understood at one value only.
FIXED_FIELDS: Mapping[str, Any] = {
    "rope_interleaved": False,
    "is_encoder_decoder": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
