"""A Hub config from the metadata of a GGUF file.

transformers has such a reading too, but it leaves out what it does not know (head_dim of Qwen3, every rope
scaling); here an unknown setting is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tp.checkpoint.gguf_header import GgufHeader
from tp.checkpoint.gguf_rope import rope_parameters
from tp.errors import CheckpointError, first_line

ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Settings that say nothing about the numbers, and settings that are understood at one value only.
_INERT = ("tensor_data_layout", "rope.scaling.finetuned")
_FIXED: Mapping[str, Any] = {
    "attention.causal": True,
    "use_parallel_residual": False,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}


def hub_config(header: GgufHeader, rope_factors: Tensor | None) -> dict[str, Any]:
    """The config.json that describes the model of a GGUF file.

    Fields of a family that GGUF does not keep (dropout, initialisation) are left to their defaults.

    Args:
        rope_factors: the values of the tensor rope_freqs.weight, where the file has one.

    Raises:
        CheckpointError: an architecture or a setting that is not supported, one that is missing, or of another type.
    """
    try:
        return _hub_config(header, rope_factors)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{header.path} has a setting of the wrong type: {first_line(error)}") from error


def _hub_config(header: GgufHeader, rope_factors: Tensor | None) -> dict[str, Any]:
    settings = _Settings(header)
    hidden_size, heads = settings.integer("embedding_length"), settings.integer("attention.head_count")
    head_dim = settings.integer("attention.key_length", hidden_size // max(1, heads))
    context_length = settings.integer("context_length")
    config: dict[str, Any] = {
        "model_type": settings.architecture,
        "hidden_size": hidden_size,
        "num_hidden_layers": settings.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": settings.integer("feed_forward_length"),
        "vocab_size": _vocab_size(header, settings),
        "max_position_embeddings": context_length,
        "rms_norm_eps": settings.take("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": rope_parameters(settings.take, head_dim, context_length, rope_factors),
        **_token_ids(header),
    }
    settings.require("attention.value_length", head_dim)
    settings.require("rope.dimension_count", head_dim)
    config |= _family_fields(header, settings)
    settings.finish()
    return config


class _Settings:
    """The metadata of a file's architecture, which notes what was taken, so that nothing is left in silence."""

    def __init__(self, header: GgufHeader) -> None:
        self.path = header.path
        self.architecture = header.metadata.get("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{self.path}: GGUF architecture {self.architecture!r} is not supported: "
                f"choose from {', '.join(ARCHITECTURES)}"
            )
        prefix = f"{self.architecture}."
        self.left = {k.removeprefix(prefix): v for k, v in header.metadata.items() if k.startswith(prefix)}

    def take(self, key: str, *default: Any) -> Any:
        """A setting, or the default; a list of one value for each layer must repeat the same value."""
        if key not in self.left and not default:
            raise CheckpointError(f"{self.path} has no {self.architecture}.{key}: it is not a complete model")
        value = self.left.pop(key, *default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise CheckpointError(
                    f"{self.path}: {self.architecture}.{key} differs by layer, which is not supported"
                )
            return value[0]
        return value

    def integer(self, key: str, *default: int) -> int:
        value = self.take(key, *default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"{self.path}: {self.architecture}.{key} is {value!r}, not an integer")
        return value

    def require(self, key: str, only: Any) -> None:
        value = self.take(key, only)
        if value != only:
            raise CheckpointError(f"{self.path}: {self.architecture}.{key}={value!r} is not supported: only {only!r}")

    def finish(self) -> None:
        for key, only in _FIXED.items():
            self.require(key, only)
        for key in _INERT:
            self.left.pop(key, None)
        if self.left:
            key, value = next(iter(self.left.items()))
            raise CheckpointError(f"{self.path}: setting {self.architecture}.{key} (value {value!r}) is not known")


def _vocab_size(header: GgufHeader, settings: _Settings) -> int:
    """Rows of the embedding, which may be more than the tokens that the tokenizer knows."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{header.path} has no token_embd.weight: it is not a complete model")
    if len(embedding.shape) != 2:
        raise CheckpointError(f"{header.path}: token_embd.weight {list(embedding.shape)} is no matrix")
    rows = embedding.shape[0]
    settings.require("vocab_size", rows)
    return rows


def _token_ids(header: GgufHeader) -> dict[str, Any]:
    """Special tokens. Ends of a turn (eot, eom) end a text as end of sequence does."""
    ids = {name: header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "padding")}
    ends = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(end for end in ends if end is not None))
    return {
        "bos_token_id": ids["bos"],
        "pad_token_id": ids["padding"],
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
    }


def _family_fields(header: GgufHeader, settings: _Settings) -> dict[str, Any]:
    """What a family's config has beyond the common fields, told by the tensors and settings that are there."""
    window = settings.take("attention.sliding_window", None)
    if settings.architecture == "qwen2":
        # Qwen2 takes its head_dim from the sizes; its config has no field for it before transformers 5.
        return {"use_sliding_window": False} if not window else _refuse_window(header, window)
    attention_bias = "blk.0.attn_q.bias" in header.tensors
    if settings.architecture == "qwen3":
        return {"attention_bias": attention_bias} if not window else _refuse_window(header, window)
    if window:  # llama with a window is Mistral, which shares its architecture name in GGUF
        return {"model_type": "mistral", "sliding_window": window}
    return {"attention_bias": attention_bias, "mlp_bias": "blk.0.ffn_up.bias" in header.tensors}


def _refuse_window(header: GgufHeader, window: int) -> dict[str, Any]:
    raise CheckpointError(f"{header.path}: a sliding window ({window}) of this architecture is not supported in GGUF")
