"""Rotary frequencies against transformers' own, for every rope type, and known values."""

from __future__ import annotations

import pytest
import torch
from tiny_models import ROPE_PARAMETERS, hub_config

from tp.config import ModelConfig
from tp.kernels.rotary import apply_rotary
from tp.layers import RotaryEmbedding, SequenceSlice, Step
from tp.layers.rope_frequencies import inverse_frequencies
from tp.rope_config import RopeConfig

VARIANTS = {
    **ROPE_PARAMETERS,
    "yarn with mscale": ROPE_PARAMETERS["yarn"] | {"mscale": 0.7, "mscale_all_dim": 0.9},
    "yarn untruncated": ROPE_PARAMETERS["yarn"] | {"truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn with attention_factor": ROPE_PARAMETERS["yarn"] | {"attention_factor": 1.5},
}


@pytest.mark.parametrize("length", [9, 40, 70])
@pytest.mark.parametrize("name", VARIANTS)
def test_cos_and_sin_equal_those_of_transformers(name, length):
    """`length` 40 and 70 are past the original context of 16 (llama3, yarn) and 32 (dynamic)."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields = hub_config("llama", rope_parameters=dict(VARIANTS[name]), max_position_embeddings=32, head_dim=24)
    config = ModelConfig.from_hf(fields)
    theirs = LlamaRotaryEmbedding(AutoConfig.for_model(fields.pop("model_type"), **fields))
    step = Step(torch.zeros(length, dtype=torch.long), (SequenceSlice(length),))
    ours = RotaryEmbedding(config.rope, config.head_dim, config.max_position_embeddings)(step, torch.float32)
    expected = theirs(torch.zeros(1), torch.arange(length)[None])
    for mine, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine.squeeze(1), other.squeeze(0), rtol=0, atol=2e-6)


def test_the_second_frequency_of_a_base_of_a_million():
    """A base of 10000 taken by default in silence would give 0.7498942."""
    frequencies = inverse_frequencies(RopeConfig(rope_theta=1e6), head_dim=64)
    assert frequencies[1].item() == pytest.approx(0.6493816, abs=1e-7)
    assert inverse_frequencies(RopeConfig(rope_theta=1e4), 64)[1].item() == pytest.approx(0.7498942, abs=1e-7)


def test_dynamic_frequencies_follow_each_sequence_and_not_its_neighbours():
    rotary = RotaryEmbedding(RopeConfig("dynamic", 3000.0, factor=3.0), head_dim=8, max_position_embeddings=16)
    long, short = SequenceSlice(20), SequenceSlice(5)
    together = rotary(Step(torch.zeros(25, dtype=torch.long), (long, short)), torch.float32)
    alone = rotary(Step(torch.zeros(5, dtype=torch.long), (short,)), torch.float32)
    assert torch.equal(together[0][20:], alone[0])
    chunk = SequenceSlice(6, start=0, total=20)  # the first chunk of a prompt of 20
    chunked = rotary(Step(torch.zeros(6, dtype=torch.long), (chunk,)), torch.float32)
    assert torch.equal(chunked[1], together[1][:6])


def test_rotation_rounds_each_product_and_the_sum():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 8, generator=generator).bfloat16()
    angles = torch.randn(3, 1, 4, generator=generator).repeat(1, 1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    half = torch.cat([-x[..., 4:], x[..., :4]], -1)
    expected = (
        (x.float() * cos.float()).bfloat16().float() + (half.float() * sin.float()).bfloat16().float()
    ).bfloat16()
    assert torch.equal(apply_rotary(x, cos, sin), expected)
