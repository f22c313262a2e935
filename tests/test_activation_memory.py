"""What a layer keeps for the backward is what is derived for it, and falls as 1/t where the stream is sharded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.activation_memory import CONFIG, measured_layer_bytes
from tp.layers import Replicate, ShardTokens
from tp.planning.activations import layer_activations

TOKENS = 96
VARIANTS = {
    "post": {"norm_placement": "post", "norm": "layer_norm"},
    "sandwich": {"norm_placement": "sandwich"},
    "sandwich with layer norm": {"norm_placement": "sandwich", "norm": "layer_norm", "attention_output_bias": True},
    "gelu": {"norm": "layer_norm", "gated_mlp": False, "activation": "gelu", "mlp_bias": True},
    "relu": {"norm_placement": "post", "gated_mlp": False, "activation": "relu"},
    "norms of q and k": {"qk_norm": True},
}


def _measured(group, config=CONFIG):
    return {
        layout.__name__: measured_layer_bytes(config, group, layout, TOKENS, torch.float32)
        for layout in (Replicate, ShardTokens)
    }


@pytest.mark.parametrize("t", [1, 2, 3])
def test_measured_equals_derived_within_five_percent(ranks, t):
    for rank, measured in enumerate(ranks(t).run(_measured)):
        for name, nbytes in measured.items():
            derived = layer_activations(CONFIG, TOKENS, 4, t, rank, sharded=name == "ShardTokens")
            assert nbytes == pytest.approx(derived.total, rel=0.05), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_placements_norms_and_mlps_are_counted_to_the_byte(ranks, variant):
    """A norm's statistics are a few bytes a row: a tolerance of some percent would hide them."""
    config = replace(CONFIG, model_type="tp_decoder", **VARIANTS[variant])
    for rank, measured in enumerate(ranks(2).run(_measured, config)):
        for name, nbytes in measured.items():
            assert nbytes == layer_activations(config, TOKENS, 4, 2, rank, sharded=name == "ShardTokens").total, name


def test_the_share_of_stream_and_norms_falls_as_one_over_t(ranks):
    """Attention and MLP are the same in both layouts, so the difference is the stream's alone."""
    whole = layer_activations(CONFIG, TOKENS, 4).stream
    for t in (2, 4):
        for measured in ranks(t).run(_measured):
            saved_by_sharding = measured["Replicate"] - measured["ShardTokens"]
            assert saved_by_sharding == pytest.approx(whole * (1 - 1 / t), rel=0.01)
