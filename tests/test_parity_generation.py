"""Greedy ids of 64 tokens equal transformers', for every family, rope type and degree, batched and alone."""

from __future__ import annotations

import pytest
import torch
from tiny_models import ROPE_PARAMETERS, TINY_CONFIGS, hub_config, parallel_model, transformers_model

from tp.generation import GenerationOptions, LanguageModel

LENGTHS = (1, 5, 17)
NEW_TOKENS = 64
SEED = 2  # of weights whose greedy ids do not soon repeat
CHUNK = 6  # cuts the prompt of 17 inside the sliding window of 7


def prompts(vocab_size, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(23)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def reference_ids(model, prompt):
    with torch.no_grad():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True)
    return tuple(ids[0, len(prompt) :].tolist())


def _generate(group, config, weights, batches, chunk):
    model = parallel_model(config, weights, group, model_class=LanguageModel)
    options = GenerationOptions(max_new_tokens=NEW_TOKENS, prefill_chunk=chunk)
    return [[s.new_ids for s in model.generate(batch, options).sequences] for batch in batches]


@pytest.fixture(scope="module")
def references():
    """For each family: a transformers model, prompts, and the ids that it continues them with."""
    found = {}
    for family in TINY_CONFIGS:
        model = transformers_model(family, SEED)
        rows = prompts(model.config.vocab_size)
        found[family] = model.state_dict(), rows, [reference_ids(model, row) for row in rows]
    return found


@pytest.mark.parametrize("t", [1, 2, 3, 4])
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_greedy_ids_of_a_batch(ranks, references, family, t):
    weights, rows, expected = references[family]
    assert all(len(set(ids)) > 2 for ids in expected), "one id repeated for ever proves little"
    for (together,) in ranks(t).run(_generate, hub_config(family), weights, [rows], CHUNK):
        assert together == expected


@pytest.mark.parametrize("t", [3, *(pytest.param(t, marks=pytest.mark.long) for t in (1, 2, 4))])
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_greedy_ids_of_each_prompt_alone(ranks, references, family, t):
    weights, rows, expected = references[family]
    for alone in ranks(t).run(_generate, hub_config(family), weights, [[row] for row in rows], CHUNK):
        assert [ids for (ids,) in alone] == expected


@pytest.mark.parametrize("rope_type", ROPE_PARAMETERS)
def test_greedy_ids_past_the_original_length(ranks, rope_type):
    """64 new tokens pass the original context of 16 (llama3, yarn) and 24 (dynamic).

    One chunk: where frequencies depend on the length, transformers knows the whole prompt from its first token on.
    """
    overrides = {"rope_parameters": ROPE_PARAMETERS[rope_type], "max_position_embeddings": 24}
    if rope_type != "dynamic":
        overrides["max_position_embeddings"] = 128
    reference = transformers_model("llama", **overrides)
    rows = prompts(reference.config.vocab_size, (2, 29))
    expected = []
    for row in rows:  # alone, each in a fresh model: frequencies that have grown stay grown in transformers
        expected.append(reference_ids(transformers_model("llama", **overrides), row))
    config = hub_config("llama", **overrides)
    for (together,) in ranks(2).run(_generate_past_context, config, reference.state_dict(), [rows]):
        assert together == expected


def _generate_past_context(group, config, weights, batches):
    model = parallel_model(config, weights, group, model_class=LanguageModel)
    model.context = 128  # a rope type that scales may run past the length that the config names
    return [
        [s.new_ids for s in model.generate(b, GenerationOptions(max_new_tokens=NEW_TOKENS)).sequences] for b in batches
    ]


def _cache_facts(group, config, weights, prompt):
    """Bytes of this rank's cache of four tokens, and the keys and values of its heads in every layer."""
    from tp.layers import KVCache, SequenceSlice, Step

    model = parallel_model(config, weights, group)
    cache = KVCache(model.config, group, num_slots=1, capacity=len(prompt), dtype=torch.float32)
    with torch.no_grad():
        model.residual_stream(Step(torch.tensor(prompt), (SequenceSlice(len(prompt)),)), cache).settle()
    return cache.nbytes, [(layer.key[0], layer.value[0]) for layer in cache.layers]


def test_the_cache_holds_this_ranks_heads_and_together_each_head_once(ranks):
    """2 KV heads on 4 ranks: one head a rank; 'local heads times t' would count 4 where the model has 2."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 12, "head_dim": 8}
    weights, prompt = transformers_model("qwen2", **sizes).state_dict(), [3, 1, 4, 1]
    config = hub_config("qwen2", **sizes)
    ((_, whole),) = ranks(1).run(_cache_facts, config, weights, prompt)
    outcomes = ranks(4).run(_cache_facts, config, weights, prompt)
    for rank, (nbytes, layers) in enumerate(outcomes):
        assert nbytes == 2 * 3 * 1 * 4 * 8 * 4  # keys and values, layers, one head, tokens, head_dim, float32
        for (key, value), (whole_key, whole_value) in zip(layers, whole, strict=True):
            head = rank // 2
            torch.testing.assert_close(key[0], whole_key[head], rtol=0, atol=1e-5)
            torch.testing.assert_close(value[0], whole_value[head], rtol=0, atol=1e-5)
