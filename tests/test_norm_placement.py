"""Norm placements, norms and MLPs as data: logits, decode and greedy ids of a plain reference, at every degree."""

from __future__ import annotations

import warnings

import pytest
import torch
from norm_placement_models import COMBINATIONS, NORMS, PLACEMENTS, placement_config, reference_model
from tiny_models import hub_config, parallel_model

from tp.config import ModelConfig
from tp.errors import ConfigError
from tp.generation import GenerationOptions, LanguageModel
from tp.generation.decode_graphs import NativeTape, capture_for
from tp.kernels.decode_attention import has_decode_attention
from tp.layers import KVCache, Replicate, SequenceSlice, ShardTokens, Step
from tp.models import CausalLM, prepare_for_inference

LAYOUTS = {"replicate": Replicate, "shard": ShardTokens}
TOLERANCE = 1e-5  # of the largest reference logit, float32
LENGTHS = (1, 11, 6)  # 18 tokens; rows of one, of an odd and of an even length


def sequences(vocab_size, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(5)
    return list(torch.randint(0, vocab_size, (sum(lengths),), generator=generator).split(lengths))


def assert_parity(actual, expected):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= TOLERANCE * expected.abs().max()


@torch.no_grad()
def logits_of(reference, rows):
    return torch.cat([reference(row) for row in rows])


@pytest.mark.parametrize("placement, norm, gated", COMBINATIONS)
def test_every_parameter_of_the_reference_is_felt(placement, norm, gated):
    """Parity proves nothing about a parameter that does not move the logits."""
    reference = reference_model(placement_config(placement, norm, gated))
    (row,) = sequences(97, [17])
    expected = logits_of(reference, [row])
    for name, parameter in reference.named_parameters():
        kept = parameter.detach().clone()
        parameter.data.zero_()
        assert (logits_of(reference, [row]) - expected).abs().max() > 30 * TOLERANCE * expected.abs().max(), name
        parameter.data.copy_(kept)


@torch.no_grad()
def _logits(group, config, weights, rows):
    """Logits of the rows as one flattened batch, in both layouts."""
    model = parallel_model(config, weights, group)
    step = Step(torch.cat(rows), tuple(SequenceSlice(len(row)) for row in rows))
    results = []
    for layout in LAYOUTS.values():
        model.model.choose_layout = layout
        results.append(model.logits_of(model.residual_stream(step)).whole())
    return results


@pytest.mark.parametrize("t", [1, 2, 3, 4])
@pytest.mark.parametrize("placement, norm, gated", COMBINATIONS)
def test_logits_equal_those_of_the_reference_in_both_layouts(ranks, placement, norm, gated, t):
    config = placement_config(placement, norm, gated)
    reference, rows = reference_model(config), sequences(97)
    expected = logits_of(reference, rows)
    for of_rank in ranks(t).run(_logits, config, reference.state_dict(), rows):
        for actual in of_rank:
            assert_parity(actual, expected)


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("gated", [True, False])
def test_other_activations_without_biases_and_with_tied_embeddings(ranks, activation, gated):
    traits = {"hidden_act": activation, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True}
    config = placement_config("post", "layer_norm", gated, **traits)
    reference, rows = reference_model(config), sequences(97)
    reference.lm_head.weight = reference.model.embed_tokens.weight
    weights = {name: tensor for name, tensor in reference.state_dict().items() if name != "lm_head.weight"}
    for of_rank in ranks(3).run(_logits, config, weights, rows):
        for actual in of_rank:
            assert_parity(actual, logits_of(reference, rows))


@torch.no_grad()
def _fewer_tokens_than_ranks(group, config, weights, row):
    model = parallel_model(config, weights, group)
    model.model.choose_layout = ShardTokens
    return model(row.unsqueeze(0))[0]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ranks_without_tokens_norm_nothing(ranks, placement):
    config = placement_config(placement, "layer_norm", False)
    reference, (row,) = reference_model(config), sequences(97, [2])
    for actual in ranks(4).run(_fewer_tokens_than_ranks, config, reference.state_dict(), row):
        assert_parity(actual, logits_of(reference, [row]))


@torch.no_grad()
def _prefill_and_decode(group, config, weights, rows, layout, num_decoded):
    """Logits of each sequence's last token: of a prefill of all but its last tokens, then of each of those."""
    model = parallel_model(config, weights, group)
    model.model.choose_layout = LAYOUTS[layout]
    cache = KVCache(model.config, group, len(rows), max(map(len, rows)), dtype=torch.float32)
    starts = [len(row) - num_decoded for row in rows]
    prompt = torch.cat([row[:start] for row, start in zip(rows, starts, strict=True)])
    step = Step(prompt, tuple(SequenceSlice(start, 0, slot) for slot, start in enumerate(starts)))
    results = [model.next_token_logits(step, cache).whole()]
    for index in range(num_decoded):
        last = torch.stack([row[start + index] for row, start in zip(rows, starts, strict=True)])
        pieces = tuple(SequenceSlice(1, start + index, slot) for slot, start in enumerate(starts))
        results.append(model.next_token_logits(Step(last, pieces), cache).whole())
    return results


@pytest.mark.parametrize("t, layout", [(1, "replicate"), (2, "shard"), (3, "replicate")])
@pytest.mark.parametrize("placement, norm", [(p, n) for p in PLACEMENTS for n in NORMS])
def test_prefill_and_decode_through_the_cache(ranks, placement, norm, t, layout):
    config = placement_config(placement, norm, gated=norm == "rms_norm")
    reference, rows = reference_model(config), sequences(97, [4, 13, 7])
    for of_rank in ranks(t).run(_prefill_and_decode, config, reference.state_dict(), rows, layout, 3):
        for index, actual in enumerate(of_rank):
            prefixes = [row[: len(row) - 3 + index] for row in rows]
            assert_parity(actual, torch.stack([logits_of(reference, [prefix])[-1] for prefix in prefixes]))


def _generated(group, config, weights, prompts):
    model = parallel_model(config, weights, group, model_class=LanguageModel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what cannot be captured is not tried
        result = model.generate(prompts, GenerationOptions(max_new_tokens=10))
    return [sequence.new_ids for sequence in result.sequences]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("norm", NORMS)
def test_greedy_ids_are_those_of_the_reference(ranks, placement, norm):
    config = placement_config(placement, norm, gated=placement == "sandwich")
    reference, prompts = reference_model(config), [[5, 6, 7], [8], [9, 2] * 6]
    with torch.no_grad():
        expected = [reference.greedy(prompt, 10) for prompt in prompts]
    assert len({token for ids in expected for token in ids}) > 3, "a model that repeats itself proves little"
    for t in (1, 2, 3):
        assert ranks(t).run(_generated, config, reference.state_dict(), prompts) == [expected] * t


def test_only_what_the_tape_holds_is_captured_for_decoding():
    """On a CPU: pre-norm with RMSNorm and a SiLU gate. Everything else decodes without, and says nothing."""
    if not has_decode_attention(torch.float32, torch.device("cpu")):
        pytest.skip("no C++ library, so no tape")
    for placement, norm, gated in COMBINATIONS:
        model = CausalLM(ModelConfig.from_hf(placement_config(placement, norm, gated, hidden_act="silu")))
        expected = NativeTape if (placement, norm, gated) == ("pre", "rms_norm", True) else type(None)
        assert type(capture_for(model)) is expected


@torch.no_grad()
def _int8_logits(group, config, weights, row):
    model = parallel_model(config, weights, group)
    plain = model(row.unsqueeze(0))
    prepare_for_inference(model, "int8")
    return plain, model(row.unsqueeze(0))


def test_int8_weights_of_a_plain_mlp(ranks):
    config = placement_config("sandwich", "layer_norm", False)
    reference, (row,) = reference_model(config), sequences(97, [9])
    arguments = config, reference.state_dict(), row
    _, expected = ranks(1).run(_int8_logits, *arguments)[0]
    for plain, actual in ranks(3).run(_int8_logits, *arguments):
        assert (actual - expected).abs().max() <= 0.02 * expected.abs().max()
        assert 0 < (actual - plain).abs().max() <= 0.1 * plain.abs().max()


# Configurations.


@pytest.mark.parametrize("placement, norm, gated", COMBINATIONS)
def test_a_configuration_is_written_and_read_back(placement, norm, gated):
    config = ModelConfig.from_hf(placement_config(placement, norm, gated))
    assert (config.norm_placement, config.norm, config.gated_mlp) == (placement, norm, gated)
    assert config.architecture == "TPDecoderForCausalLM"
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_absent_fields_are_those_of_the_hubs_families():
    config = placement_config("pre", "rms_norm", True)
    for name in ("norm_placement", "norm", "gated_mlp"):
        del config[name]
    read = ModelConfig.from_hf(config)
    assert (read.norm_placement, read.norm, read.gated_mlp) == ("pre", "rms_norm", True)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"norm_placement": "peri"}, "norm_placement 'peri' is not supported: choose from pre, post, sandwich"),
        ({"norm": "batch_norm"}, "norm 'batch_norm' is not supported: choose from rms_norm, layer_norm"),
        ({"norm_placement": None}, "norm_placement None is not supported"),
        ({"gated_mlp": "yes"}, "gated_mlp is 'yes': it must be true or false"),
        ({"hidden_act": "swish7"}, "activation 'swish7' is not supported"),
        ({"norm_order": "post"}, "config field 'norm_order' .* is not known for tp_decoder"),
        ({"architectures": ["LlamaForCausalLM"]}, "architecture 'LlamaForCausalLM' is not supported for tp_decoder"),
    ],
)
def test_unknown_values_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(placement_config("pre", "rms_norm", True) | fields)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("name, value", [("norm_placement", "post"), ("norm", "layer_norm"), ("gated_mlp", False)])
def test_the_hubs_families_have_no_choice(family, name, value):
    with pytest.raises(ConfigError, match=f"config field '{name}' .* is not known for {family}"):
        ModelConfig.from_hf(hub_config(family) | {name: value})
    config = ModelConfig.from_hf(hub_config(family))
    with pytest.raises(ConfigError, match=f"{name} is {value!r}: {family} models have"):
        ModelConfig(**vars(config) | {name: value})
