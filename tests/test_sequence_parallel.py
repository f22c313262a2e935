"""The sharded stream computes what the replicated one does: prefill, decode, taps; any N, N < t included."""

from __future__ import annotations

import pytest
import torch
from tiny_models import TINY_CONFIGS, hub_config, parallel_model, transformers_model

from tp.errors import LayoutError
from tp.generation import GenerationOptions, LanguageModel
from tp.layers import (
    KVCache,
    Normed,
    Replicate,
    RowParallelLinear,
    SequenceSlice,
    ShardTokens,
    Step,
    Tap,
    automatic_layout,
)
from tp.layers.layout import SHARDED_PREFILL_TOKENS
from tp.parallel import TensorParallelGroup

CASES = [(5, 2), (7, 4), (1, 4), (3, 4), (17, 3)]  # (tokens, degree): none divides


def _prefill_and_decode(group, config, weights, num_tokens, layout):
    """Whole logits, last-row logits of a prefill of three unequal sequences, and of two decode steps after it."""
    model = parallel_model(config, weights, group)
    model.model.choose_layout = layout
    generator = torch.Generator().manual_seed(num_tokens)
    lengths = [num_tokens, 1, num_tokens + 2]
    ids = torch.randint(0, config["vocab_size"], (sum(lengths),), generator=generator)
    cache = KVCache(model.config, group, 3, num_tokens + 4, dtype=torch.float32)
    results = []
    with torch.no_grad():
        results.append(model(ids[:num_tokens].unsqueeze(0)))
        step = Step(ids, tuple(SequenceSlice(n, 0, slot) for slot, n in enumerate(lengths)))
        results.append(model.next_token_logits(step, cache).whole())
        for later in range(2):
            step = Step(ids[:3] + later, tuple(SequenceSlice(1, n + later, s) for s, n in enumerate(lengths)))
            results.append(model.next_token_logits(step, cache).whole())
    return results


@pytest.mark.parametrize(
    "family, num_tokens, t", [*(("qwen3", *case) for case in CASES), *((family, 7, 4) for family in TINY_CONFIGS)]
)
def test_logits_equal_those_of_the_replicated_stream(ranks, family, num_tokens, t):
    arguments = hub_config(family), transformers_model(family).state_dict(), num_tokens
    replicated = ranks(t).run(_prefill_and_decode, *arguments, Replicate)
    sharded = ranks(t).run(_prefill_and_decode, *arguments, ShardTokens)
    for mine, other in zip(sharded, replicated, strict=True):
        for a, b in zip(mine, other, strict=True):
            assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def _bfloat16_logits(group, config, weights):
    model = parallel_model(config, weights, group, torch.bfloat16)
    ids = torch.randint(0, config["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(0))
    results = []
    for layout in (Replicate, ShardTokens):
        model.model.choose_layout = layout
        with torch.no_grad():
            results.append(model(ids).float())
    return results


@pytest.mark.parametrize("t", [2, 4])
def test_bfloat16_logits_are_the_same_in_both_layouts(ranks, t):
    """Both add the same addends in rank order in float32 and round once; 2^-7 is one step of bfloat16."""
    for replicated, sharded in ranks(t).run(
        _bfloat16_logits, hub_config("qwen3"), transformers_model("qwen3").state_dict()
    ):
        assert (replicated - sharded).abs().max() <= 2**-7 * replicated.abs().max()


def _captured(group, config, weights, layout):
    """Every write of a forward, gathered to whole [N, D]."""
    captured = {}

    class Everything(Tap):
        def on_stream(self, site, value, layout):
            captured[site] = layout.replicated(value).clone()
            return value

    model = parallel_model(config, weights, group)
    model.model.tap = Everything()
    model.model.choose_layout = layout
    with torch.no_grad():
        stream = model.model(Step(torch.tensor([3, 1, 4, 1, 5]), (SequenceSlice(5),)))
        taken = stream.take(torch.tensor([4, 0, 4])).settle()
    return captured, taken


def test_captured_writes_and_selected_rows_are_bitwise_those_of_the_replicated_stream(ranks):
    arguments = hub_config("llama"), transformers_model("llama").state_dict()
    expected, expected_rows = ranks(4).run(_captured, *arguments, Replicate)[0]
    for captured, rows in ranks(4).run(_captured, *arguments, ShardTokens):
        assert captured.keys() == expected.keys()
        assert torch.equal(rows, expected_rows)
        for site, update in captured.items():
            assert torch.equal(update, expected[site]), site


def _generated(group, config, weights, layout):
    model = parallel_model(config, weights, group, model_class=LanguageModel)
    model.model.choose_layout = layout
    return [
        s.new_ids for s in model.generate([[5, 6, 7], [8], [9] * 11], GenerationOptions(max_new_tokens=12)).sequences
    ]


@pytest.mark.parametrize("t", [2, 4])
def test_greedy_ids_do_not_depend_on_the_layout(ranks, t):
    arguments = hub_config("mistral"), transformers_model("mistral", 2).state_dict()
    expected = ranks(1).run(_generated, *arguments, Replicate)
    assert ranks(t).run(_generated, *arguments, ShardTokens) == expected * t


def test_the_automatic_layout_shards_training_and_long_prefill():
    group = TensorParallelGroup.alone()
    assert isinstance(automatic_layout(group, 3), ShardTokens)  # with gradients
    with torch.no_grad():
        assert isinstance(automatic_layout(group, 3), Replicate)
        assert isinstance(automatic_layout(group, SHARDED_PREFILL_TOKENS), ShardTokens)


def _row_parallel_of_a_shard(group):
    layer = RowParallelLinear(4, 3, group)
    try:
        layer(Normed(torch.ones(1, 4), ShardTokens(group, 2)))
    except LayoutError as error:
        return str(error)


def test_a_shard_given_to_what_wants_a_whole_is_an_error_by_type(ranks):
    message = "a row-parallel linear takes the Tensor of a column-parallel one, not a Normed"
    assert ranks(2).run(_row_parallel_of_a_shard) == [message] * 2
