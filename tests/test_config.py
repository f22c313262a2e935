"""Hub configs: both spellings, defaults, and nothing dropped in silence."""

from __future__ import annotations

import pytest
from tiny_models import ROPE_PARAMETERS, TINY_CONFIGS, hub_config

from tp.config import ModelConfig
from tp.errors import ConfigError


@pytest.mark.parametrize("rope_type", ROPE_PARAMETERS)
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_what_is_written_is_read_back_by_us_and_by_transformers(family, rope_type):
    config = ModelConfig.from_hf(hub_config(family, rope_parameters=ROPE_PARAMETERS[rope_type], eos_token_id=[5, 3]))
    assert config.eos_token_ids == (5, 3)
    assert ModelConfig.from_hf(config.to_hf()) == config

    from transformers import AutoConfig

    fields = config.to_hf()
    theirs = AutoConfig.for_model(fields.pop("model_type"), **fields)
    assert ModelConfig.from_hf(theirs) == config


def test_head_dim_apart_from_hidden_size_is_kept():
    config = ModelConfig.from_hf(
        hub_config("llama", hidden_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    )
    assert config.head_dim == 8
    assert config.to_hf()["head_dim"] == 8
    assert ModelConfig.from_hf(hub_config("qwen2", hidden_size=48, head_dim=None)).head_dim == 48 // 6


def test_absent_fields_get_the_defaults_of_transformers():
    config = ModelConfig.from_hf({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]})
    assert (config.hidden_size, config.head_dim, config.num_kv_heads, config.norm_eps) == (4096, 128, 32, 1e-6)
    assert config.rope.rope_theta == 10000.0


def test_both_spellings_of_the_rope_settings_are_one():
    old = hub_config("llama", rope_theta=5e5, rope_scaling={"type": "linear", "factor": 3.0})
    new = hub_config("llama", rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 3.0})
    assert ModelConfig.from_hf(old).rope == ModelConfig.from_hf(new).rope
    assert ModelConfig.from_hf(old).rope.rope_theta == 5e5
    llama3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = ModelConfig.from_hf(hub_config("llama", rope_scaling=llama3)).rope
    assert (rope.factor, rope.original_max_position_embeddings) == (32.0, 128)


def test_windows_follow_the_layer_types():
    assert ModelConfig.from_hf(hub_config("mistral")).sliding_windows == (7, 7, 7)
    qwen2 = hub_config("qwen2", sliding_window=9, use_sliding_window=True, max_window_layers=1)
    assert ModelConfig.from_hf(qwen2).sliding_windows == (None, 9, 9)
    assert ModelConfig.from_hf(hub_config("qwen2", sliding_window=9)).sliding_windows == (None, None, None)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"model_type": "gpt2"}, r"model_type 'gpt2' is not supported: choose from llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type 'None' is not supported"),
        (hub_config("llama", architectures=["LlamaForTokenClassification"]), "'LlamaForTokenClassification'"),
        (hub_config("llama", rope_scaling={"rope_type": "longrope"}), "rope type 'longrope'.*default,"),
        (hub_config("llama", rope_scaling={"rope_type": "ntk-by-magic"}), "rope type 'ntk-by-magic'"),
        (hub_config("llama", rope_scaling={"rope_type": "linear"}), "factor"),
        (hub_config("llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "odd": 1}), "odd"),
        (hub_config("llama", rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary"),
        (hub_config("qwen2", hidden_act="swish7"), "activation 'swish7' is not supported: choose from silu"),
        (hub_config("llama", logit_scale=2.0), "'logit_scale' .value 2.0. is not known for llama"),
        (hub_config("llama", sliding_window=7), "'sliding_window'"),
        (hub_config("llama", quantization_config={"quant_method": "fp8"}), "quantization_config"),
        (hub_config("llama", num_key_value_heads=2), "9 is not a multiple of num_kv_heads 2"),
        (hub_config("llama", num_attention_heads=0), "not valid|positive"),
        (hub_config("llama", hidden_size=-45), "hidden_size is -45"),
        (hub_config("llama", vocab_size="many"), "vocab_size"),
        (hub_config("llama", vocab_size=0), "vocab_size is 0: it must be a positive integer below 2\\^31"),
        (hub_config("llama", vocab_size=10**30), "vocab_size is 10{30}: it must be a positive integer"),
        (hub_config("llama", head_dim=16.5), "head_dim"),
        (hub_config("qwen2", head_dim=1e30), "head_dim is 1e.30: it must be a positive integer"),
        (hub_config("llama", dtype=["float32"]), "llama config is not valid"),
        (hub_config("llama", architectures=3), "architectures is 3: it must be a list"),
        (hub_config("llama", architectures={"a": 1}), "architectures is .*: it must be a list"),
        ({"model_type": ["llama"]}, "is not supported: choose from llama"),
        (hub_config("llama", rope_parameters={"rope_type": {}}), "rope type {} is not supported"),
        (hub_config("llama", rope_parameters="yarn"), "the rope settings are 'yarn': they must be an object"),
        (hub_config("llama", rope_scaling=[3]), "the rope settings are .3.: they must be an object"),
        (
            hub_config("llama", rope_parameters=ROPE_PARAMETERS["yarn"] | {"rope_theta": 1.0}),
            "rope_theta is 1: rope type 'yarn' divides by its logarithm",
        ),
        (hub_config("llama", head_dim=15), "even|odd"),
        (
            hub_config("qwen2", layer_types=["full_attention", "chunked_attention", "full_attention"]),
            "chunked_attention",
        ),
        (hub_config("mistral", sliding_window=-1), "sliding_window is -1"),
    ],
)
def test_what_is_not_understood_is_an_error_that_names_it(fields, message):
    with pytest.raises(ConfigError, match=message) as raised:
        ModelConfig.from_hf(fields)
    assert len(str(raised.value).splitlines()) <= 2
