"""`loss.backward()` alone leaves the single-device gradients: every family, degree and layout."""

from __future__ import annotations

import pytest
import torch
from test_initialisation import assemble
from tiny_models import TINY_CONFIGS, hub_config, parallel_model, transformers_model
from torch.nn import functional

from tp.layers import Replicate, SequenceSlice, ShardTokens, Step
from tp.layers.parameter import named_parts

LAYOUTS = {"replicate": Replicate, "shard": ShardTokens}
LENGTHS = (1, 6, 4)  # 11 tokens: divided by none of 2, 3, 4; the last rank of 4 has 2


def batch(vocab_size, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, vocab_size, (sum(lengths),), generator=generator)
    labels = torch.randint(0, vocab_size, (sum(lengths),), generator=generator)
    return ids, labels


def _gradients(group, config, weights, layout, dtype, lengths):
    """Loss (float), pieces of every gradient of this rank, and whether padding of the gradients is zero."""
    model = parallel_model(config, weights, group, dtype)
    model.model.choose_layout = LAYOUTS[layout]
    ids, labels = batch(config["vocab_size"], lengths)
    step = Step(ids, tuple(SequenceSlice(length) for length in lengths))
    logits = model.lm_head(model.model.final_norm(model.model(step))).whole()
    loss = functional.cross_entropy(logits, labels)
    loss.backward()
    pieces, padding = [], 0.0
    for parameter in named_parts(model):
        gradient = parameter.tensor.grad
        rest = gradient.clone()
        for part in parameter.parts:
            pieces.append(
                (part.name, part.dim, part.global_start, part.global_length,
                 gradient.narrow(part.dim, part.local_start, part.length))
            )  # fmt: skip
            rest.narrow(part.dim, part.local_start, part.length).zero_()
        padding += rest.abs().sum().item()
    return loss.item(), pieces, padding


def assembled(outcomes):
    """Whole gradients; `assemble` checks that ranks that share a parameter have bitwise equal gradients."""
    assert all(padding == 0 for *_, padding in outcomes)
    return outcomes[0][0], assemble([pieces for _, pieces, _ in outcomes])


def assert_gradients(actual, expected, tolerance):
    """Within `tolerance` of each tensor's largest entry, and of 0 where a gradient is 0 but for rounding."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (actual[name] - gradient).abs().max() <= tolerance * max(gradient.abs().max(), 1e-3), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("t", [2, 3, 4])
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_gradients_equal_those_of_one_rank_in_float64(ranks, family, t, layout):
    weights = transformers_model(family).double().state_dict()
    arguments = hub_config(family), weights, layout, torch.float64, LENGTHS
    expected_loss, expected = assembled(ranks(1).run(_gradients, *arguments))
    loss, gradients = assembled(ranks(t).run(_gradients, *arguments))
    assert abs(loss - expected_loss) < 1e-12
    assert_gradients(gradients, expected, 1e-11)


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (2, 1)])
def test_ranks_without_tokens_take_part_and_have_gradients(ranks, lengths):
    """Fewer tokens than ranks: the last ones hold none of the stream."""
    weights = transformers_model("qwen3").double().state_dict()
    arguments = hub_config("qwen3"), weights, "shard", torch.float64, lengths
    _, expected = assembled(ranks(1).run(_gradients, *arguments))
    _, gradients = assembled(ranks(4).run(_gradients, *arguments))
    assert_gradients(gradients, expected, 1e-11)


@pytest.mark.parametrize("heads, kv_heads, t", [(4, 1, 2), (4, 1, 4), (10, 2, 3), (6, 2, 4)])
def test_gradients_of_kv_heads_on_several_ranks(ranks, heads, kv_heads, t):
    """Left unreduced, each rank trains its own copy: the loss explodes after thousands of steps."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * 3, "head_dim": 6}
    weights = transformers_model("qwen2", **sizes).double().state_dict()
    arguments = hub_config("qwen2", **sizes), weights, "shard", torch.float64, LENGTHS
    _, expected = assembled(ranks(1).run(_gradients, *arguments))
    _, gradients = assembled(ranks(t).run(_gradients, *arguments))
    assert_gradients(gradients, expected, 1e-11)


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_gradients_equal_those_of_transformers_in_float32(ranks, family):
    reference = transformers_model(family)
    weights = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    ids, labels = batch(reference.config.vocab_size)
    logits = torch.cat([reference(row[None]).logits[0] for row in ids.split(LENGTHS)])
    loss = functional.cross_entropy(logits, labels)
    loss.backward()
    arguments = hub_config(family), weights, "shard", torch.float32, LENGTHS
    our_loss, gradients = assembled(ranks(3).run(_gradients, *arguments))
    assert our_loss == pytest.approx(loss.item(), rel=1e-6)
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert_gradients(gradients, theirs, 1e-5)


def _accumulated(group, config, weights):
    """Three micro-batches accumulated, against one batch of all."""
    ids, labels = batch(config["vocab_size"])
    results = []
    for cuts in (LENGTHS, (sum(LENGTHS),)):
        model = parallel_model(config, weights, group, torch.float64)
        model.model.choose_layout = ShardTokens
        for micro_ids, micro_labels in zip(ids.split(cuts), labels.split(cuts), strict=True):
            pieces = (SequenceSlice(len(micro_ids)),) if len(cuts) > 1 else tuple(SequenceSlice(n) for n in LENGTHS)
            logits = model.lm_head(model.model.final_norm(model.model(Step(micro_ids, pieces)))).whole()
            (functional.cross_entropy(logits, micro_labels, reduction="sum") / len(ids)).backward()
        results.append({p.path: p.tensor.grad for p in named_parts(model)})
    return [name for name, g in results[0].items() if (g - results[1][name]).abs().max() > 1e-11 * g.abs().max()]


@pytest.mark.parametrize("t", [2, 4])
def test_three_micro_batches_equal_one_batch(ranks, t):
    """Gradients are summed inside the graph, so they are finished before they accumulate."""
    weights = transformers_model("qwen3").double().state_dict()
    assert ranks(t).run(_accumulated, hub_config("qwen3"), weights) == [[]] * t
