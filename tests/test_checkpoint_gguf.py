"""GGUF files against the same weights in safetensors, and the configuration that their metadata describes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoint_samples import (
    assert_same_tensors,
    load,
    make_config,
    make_tensors,
    on_ranks,
    whole_tensors,
    write_directory,
    write_gguf,
)

from tp.checkpoint import open_checkpoint
from tp.checkpoint.gguf_rope import llama3_factors
from tp.checkpoint.same_checkpoint import check_same_values
from tp.config import ModelConfig
from tp.errors import CheckpointError
from tp.parallel import TensorParallelGroup
from tp.rope_config import RopeConfig

Kind = gguf.GGMLQuantizationType
Settings = Callable[[gguf.GGUFWriter], None]
ALONE = TensorParallelGroup.alone()


def nothing(writer: gguf.GGUFWriter) -> None:
    pass


def decoded(tensors: dict[str, torch.Tensor], kinds: Callable[[str], Kind]) -> dict[str, torch.Tensor]:
    """What is left of matrices after their quantisation, in the Hub's order of rows."""
    result = {}
    for name, tensor in tensors.items():
        packed = gguf.quantize(tensor.numpy(), kinds(name)) if tensor.dim() == 2 else None
        result[name] = tensor if packed is None else torch.from_numpy(gguf.dequantize(packed, kinds(name)))
    return result


@pytest.mark.parametrize(
    "config",
    [
        make_config("qwen2"),
        make_config("qwen2", tie_word_embeddings=True),
        make_config("qwen3", tie_word_embeddings=True),
        make_config("qwen3", num_attention_heads=5, num_kv_heads=5, head_dim=32),
        make_config("llama"),
        make_config("llama", num_attention_heads=9, num_kv_heads=3, hidden_size=288, tie_word_embeddings=True),
        make_config("llama", qkv_bias=True, attention_output_bias=True, mlp_bias=True),
        make_config("mistral", sliding_windows=(7, 7)),
    ],
    ids=lambda config: f"{config.model_type}-{config.num_attention_heads}",
)
def test_a_float_file_holds_the_same_model_as_a_directory(tmp_path: Path, config: ModelConfig) -> None:
    """Biases of q, k and v are there; Llama's q and k are put back in order, others' are not; tied without a head."""
    tensors = make_tensors(config)
    directory = write_directory(tmp_path / "model", config, tensors)

    def settings(writer: gguf.GGUFWriter) -> None:
        if config.sliding_windows[0] is not None:
            writer.add_sliding_window(7)

    file = write_gguf(tmp_path / "model.gguf", config, tensors, settings=settings)
    assert open_checkpoint(file, ALONE).config == open_checkpoint(directory, ALONE).config
    assert open_checkpoint(file, ALONE).default_dtype == torch.bfloat16
    for tp_size in (1, 4):
        models = [model for model, _ in on_ranks(tp_size, lambda group: load(file, group))]
        assert_same_tensors(whole_tensors(models), tensors)


def test_logits_of_both_formats_are_equal(tmp_path: Path) -> None:
    for model_type in ("qwen2", "llama"):
        config = make_config(model_type)
        tensors = make_tensors(config)
        directory = write_directory(tmp_path / model_type, config, tensors)
        file = write_gguf(tmp_path / f"{model_type}.gguf", config, tensors)
        ids = torch.tensor([[3, 96, 0, 41, 17]])
        with torch.no_grad():
            expected, actual = (load(path, ALONE)[0](ids) for path in (directory, file))
        assert expected.std() > 0.1
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@pytest.mark.parametrize("tp_size", [1, 4, 7])
def test_quantised_files_at_degrees_that_cut_through_blocks(tmp_path: Path, model_type: str, tp_size: int) -> None:
    """160 features on 4 ranks are 40 a rank, on 7 ranks 22 or 23: column cuts fall inside blocks of 32."""
    config = make_config(model_type, num_attention_heads=9, num_kv_heads=3, hidden_size=288, tie_word_embeddings=True)
    tensors = make_tensors(config)
    kinds = {name: Kind.Q4_0 for name in tensors if ".mlp." in name} | {
        "model.layers.1.mlp.down_proj.weight": Kind.Q5_1,
        "model.layers.0.self_attn.k_proj.weight": Kind.F16,
        "model.embed_tokens.weight": Kind.BF16,
    }
    path = write_gguf(tmp_path / "model.gguf", config, tensors, Kind.Q8_0, kinds=kinds)
    results = on_ranks(tp_size, lambda group: load(path, group))
    assert_same_tensors(
        whole_tensors([model for model, _ in results]), decoded(tensors, lambda name: kinds.get(name, Kind.Q8_0))
    )
    stored = sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)
    compared = on_ranks(tp_size, lambda group: check_same_values(open_checkpoint(path, group).source, group))
    read = [report.bytes_read - sample for (_, report), sample in zip(results, compared, strict=True)]
    assert all(count >= stored / tp_size * 0.8 for count in read)
    assert stored <= sum(read) <= stored * (1.0 if tp_size == 1 else 1.5)


@pytest.mark.parametrize("name", ["blk.0.attn_q.scale", "blk.2.ffn_up.weight", "rope_factors_long.weight"])
def test_a_tensor_that_nobody_takes_is_an_error(tmp_path: Path, name: str) -> None:
    config = make_config("qwen2")
    extra = {name: np.ones((4, 4), dtype=np.float32)}
    path = write_gguf(tmp_path / "model.gguf", config, make_tensors(config), extra=extra)
    known = name.replace("blk.2.ffn_up", "model.layers.2.mlp.up_proj")
    with pytest.raises(CheckpointError, match=f"holds {known}, which no parameter"):
        load(path, ALONE)


def test_a_tensor_that_is_missing_or_not_decodable_is_an_error(tmp_path: Path) -> None:
    config = make_config("qwen2")
    tensors = make_tensors(config)
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    path = write_gguf(tmp_path / "model.gguf", config, tensors)
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.bias"):
        load(path, ALONE)
    tensors = make_tensors(config)
    path = write_gguf(tmp_path / "b.gguf", config, tensors)
    content = bytearray(path.read_bytes())
    where = content.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 16
    content[where : where + 4] = (9).to_bytes(4, "little")  # Q8_1, an intermediate type that no file holds
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight is stored as Q8_1"):
        load(path, ALONE)
    content[where : where + 4] = (999).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight is stored as ggml type 999"):
        load(path, ALONE)


# The configuration.


def config_of(tmp_path: Path, config: ModelConfig, settings: Settings = nothing, **extra: Any) -> ModelConfig:
    path = write_gguf(tmp_path / "model.gguf", config, make_tensors(config), settings=settings, extra=extra)
    return open_checkpoint(path, ALONE).config


def test_every_size_is_the_files(tmp_path: Path) -> None:
    config = make_config("qwen3", vocab_size=131, rope=RopeConfig(rope_theta=1e6), max_position_embeddings=77)
    assert config_of(tmp_path, config) == config
    assert config.head_dim * config.num_attention_heads != config.hidden_size


def test_settings_at_their_only_value_are_understood(tmp_path: Path) -> None:
    def settings(writer: gguf.GGUFWriter) -> None:
        writer.add_vocab_size(97)
        writer.add_causal_attention(True)
        writer.add_rope_dimension_count(32)
        writer.add_expert_count(0)
        writer.add_rope_scaling_finetuned(True)

    config = make_config("llama")
    assert config_of(tmp_path, config, settings) == config


@pytest.mark.parametrize(
    "setting, message",
    [
        (lambda w: w.add_logit_scale(0.5), "llama.logit_scale"),
        (lambda w: w.add_rope_dimension_count(16), "llama.rope.dimension_count=16"),
        (lambda w: w.add_vocab_size(96), "llama.vocab_size=96"),
        (lambda w: w.add_expert_count(8), "llama.expert_count=8"),
        (lambda w: w.add_causal_attention(False), "llama.attention.causal=False"),
        (lambda w: w.add_array("llama.attention.sliding_window_pattern", [1, 0]), "sliding_window_pattern"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "'longrope' is not supported"),
        (lambda w: w.add_rope_scaling_attn_factors(1.5), "attn_factor=1.5"),
        (lambda w: w.add_string("llama.rope.scaling.factor", "much"), "a setting of the wrong type: .*'much'"),
        (lambda w: w.add_array("general.alignment", [32, 32]), "damaged or truncated"),
        (lambda w: w.add_string("split.count", "two"), "one of two parts"),
    ],
)  # fmt: skip
def test_a_setting_that_is_not_understood_is_an_error(tmp_path: Path, setting: Settings, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_of(tmp_path, make_config("llama"), setting)


def test_an_architecture_that_is_not_supported_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma3")
    writer.add_context_length(10)
    writer.add_tensor("token_embd.weight", np.ones((3, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="'gemma3' is not supported: choose from llama, qwen2, qwen3"):
        open_checkpoint(tmp_path / "model.gguf", ALONE)


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(8.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    assert config_of(tmp_path, make_config("llama"), linear).rope == RopeConfig("linear", 50000.0, 4.0)
    found = config_of(tmp_path, make_config("qwen2"), yarn).rope
    assert (found.rope_type, found.factor, found.original_max_position_embeddings) == ("yarn", 8.0, 64)
    found = config_of(tmp_path, make_config("llama"), lambda w: w.add_float32("llama.rope.scale_linear", 2.0)).rope
    assert (found.rope_type, found.factor) == ("linear", 2.0)


@pytest.mark.parametrize(
    "factor, high, context",
    [(8.0, 4.0, 8192), (32.0, 4.0, 8192), (8.0, 4.0, 64), (5.0, 3.0, 700), (16.0, 8.0, 5000)],
)
def test_llama3_scaling_is_found_in_the_frequency_factors(
    tmp_path: Path, factor: float, high: float, context: int
) -> None:
    """llama.cpp keeps by what frequencies are divided, not the settings: factor 32 must not be read as 8."""
    config = make_config("llama", head_dim=128, hidden_size=96, rope=RopeConfig(rope_theta=500000.0))
    rope = RopeConfig(
        "llama3",
        500000.0,
        factor,
        original_max_position_embeddings=context,
        low_freq_factor=1.0,
        high_freq_factor=high,
    )
    factors = llama3_factors(rope, 128).float().numpy()
    assert config_of(tmp_path, config, **{"rope_freqs.weight": factors}).rope == rope


def test_frequency_factors_are_read_whatever_torchs_default_dtype(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        test_llama3_scaling_is_found_in_the_frequency_factors(tmp_path, 8.0, 4.0, 8192)
    finally:
        torch.set_default_dtype(torch.float32)


def test_llama3_factors_have_the_values_of_the_published_formula() -> None:
    """Wavelengths 2π · 10ʲ: those below 8192/4 are kept, those above 8192 divided by 8, 6283 is interpolated."""
    factors = llama3_factors(RopeConfig("llama3", 1e10, 8.0, 8192, 1.0, 4.0), 20).tolist()
    assert factors[:3] == pytest.approx([1.0] * 3) and factors[4:] == pytest.approx([8.0] * 6)
    smooth = (8192 / (2 * math.pi * 1000) - 1) / 3
    assert factors[3] == pytest.approx(1 / ((1 - smooth) / 8 + smooth), rel=1e-6)


def test_frequency_factors_that_are_no_llama3_scaling_are_an_error(tmp_path: Path) -> None:
    config = make_config("llama")
    for factors in (np.linspace(1, 9, 16), np.zeros(16), np.full(16, np.nan)):
        with pytest.raises(CheckpointError, match=r"rope_freqs\.weight are not those of any llama3 rope scaling"):
            config_of(tmp_path, config, **{"rope_freqs.weight": factors.astype(np.float32)})
    ones = np.ones(16, dtype=np.float32)
    assert config_of(tmp_path, config, **{"rope_freqs.weight": ones}) == config


def test_ends_of_a_turn_end_a_text(tmp_path: Path) -> None:
    def settings(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(7)
        writer.add_pad_token_id(3)

    checkpoint = config_of(tmp_path, make_config("qwen2"), settings)
    assert checkpoint.eos_token_ids == (5, 7)
    assert checkpoint.bos_token_id == 1 and checkpoint.pad_token_id == 3
