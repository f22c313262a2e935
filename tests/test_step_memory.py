"""What a step without gradients holds at once, by the allocator, is what the planner derives for it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from allocation import most_allocated

from benchmarks.activation_memory import CONFIG
from tp.generation.cache_plan import Room
from tp.kernels import upcast_matmul
from tp.layers import KVCache, Replicate, SequenceSlice, ShardTokens, Step
from tp.models import CausalLM, initialise_parameters
from tp.planning.activations import step_activations
from tp.planning.parameters import rank_models
from tp.planning.precision import Precision

TOKENS = 384
SHAPES: dict[str, dict[str, Any]] = {
    "MLP": {},
    "attention": {"num_kv_heads": 8, "intermediate_size": 64},
    "norms of q and k": {"model_type": "qwen3", "qk_norm": True, "qkv_bias": False, "intermediate_size": 300},
    "write": {"hidden_size": 2048, "intermediate_size": 300},
    "gathered input": {"hidden_size": 2048, "intermediate_size": 3072},
    "no gate": {"model_type": "tp_decoder", "gated_mlp": False, "activation": "gelu", "intermediate_size": 2048},
}
"""By what takes most, at t = 1 but for the gathered input, which does at t = 3 where the stream is sharded."""


@torch.no_grad()
def peaks(group, dtype):
    """(by the allocator, as derived) of each shape's prefill, in either layout."""
    found = {}
    for name, shape in SHAPES.items():
        config = replace(CONFIG, **shape, num_layers=2, sliding_windows=())
        model = CausalLM(config, group, dtype=dtype)
        initialise_parameters(model, seed=0)
        planned = rank_models(config, Precision.of(str(dtype).removeprefix("torch.")), group.size)[group.rank]
        cache = KVCache(config, group, 2, TOKENS, dtype=dtype)
        step = Step(
            torch.zeros(TOKENS, dtype=torch.long), (SequenceSlice(TOKENS - 200, 0, 0), SequenceSlice(200, 0, 1))
        )
        for layout in (Replicate, ShardTokens):
            model.model.choose_layout = layout
            sharded = layout is ShardTokens and group.size > 1
            derived = step_activations(planned, TOKENS, 2, sharded=sharded)
            measured = most_allocated(partial(model.next_token_logits, step, cache))
            found[f"{name}, {layout.__name__}"] = measured, derived
    return found


@pytest.mark.parametrize("t", [1, 2, 3])
def test_a_prefill_holds_what_is_derived_within_ten_percent(ranks, t):
    for rank in ranks(t).run(peaks, torch.float32):
        for case, (measured, derived) in rank.items():
            assert measured == pytest.approx(derived, rel=0.1), case


def room_and_derived(group):
    """What a request leaves for each shape's prefill, and what is derived for it, in the layout that takes more."""
    found = {}
    for name, shape in SHAPES.items():
        config = replace(CONFIG, **shape, num_layers=2, sliding_windows=())
        planned = rank_models(config, Precision.of("bfloat16"), group.size)[group.rank]
        room = Room.of(CausalLM(config, group, dtype=torch.bfloat16, device="meta"), 0)
        derived = max(step_activations(planned, TOKENS, 2, sharded=sharded) for sharded in (False, group.size > 1))
        found[name] = -room.beside_prompts(TOKENS, TOKENS), derived
    return found


@pytest.mark.parametrize("t", [1, 2, 3, 5])
def test_a_request_leaves_room_for_what_is_derived(ranks, t):
    for rank in ranks(t).run(room_and_derived):
        for case, (left, derived) in rank.items():
            assert 1.1 * derived < left < 3 * derived, case


def peaks_in_bfloat16(group):
    """Without float32 copies of weights of odd width, which a CPU without bfloat16 products makes: none is derived."""
    with mock.patch.object(upcast_matmul, "_lacks_products", return_value=False):
        return peaks(group, torch.bfloat16)


@pytest.mark.long
@pytest.mark.parametrize("t", [1, 2, 3, 5])
def test_so_it_does_in_bfloat16(ranks, t):
    for rank in ranks(t).run(peaks_in_bfloat16):
        for case, (measured, derived) in rank.items():
            assert measured == pytest.approx(derived, rel=0.1), case
