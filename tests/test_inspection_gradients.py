"""Gradients at the points are torch.autograd's of the unsharded model; capturing in training changes nothing of it."""

from __future__ import annotations

import pytest
import torch
from inspection_references import LAYOUTS, assert_close, hooked, of_sequence, rows_of
from tiny_models import TINY_CONFIGS, hub_config, parallel_model, transformers_model
from torch.nn import functional

from tp.errors import RequestError
from tp.inspection import capture, identity_and_sublayer_gradients
from tp.layers import SequenceSlice, Step
from tp.parallel import TensorParallelGroup
from tp.training import checkpoint_layers

POINTS = ("embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post", "final_norm", "z")
BATCHES = ((1, 6, 4), (5, 2))  # 11 and 7 tokens


def batches(vocab_size):
    """Two batches of sequences with their labels."""
    return [[(row, row.flip(0)) for row in rows_of(vocab_size, lengths, seed=3)] for lengths in BATCHES]


def keys_of(num_layers):
    layerless = ("embed", "final_norm")
    return [(point, None) for point in layerless] + [
        (point, layer) for point in POINTS if point not in layerless for layer in range(num_layers)
    ]


def loss_of(model, batch):
    ids, labels = (torch.cat(column) for column in zip(*batch, strict=True))
    step = Step(ids, tuple(SequenceSlice(len(row)) for row, _ in batch))
    logits = model.logits_of(model.residual_stream(step)).whole()
    return functional.cross_entropy(logits, labels, reduction="sum")


def _trained(group, config, weights, layout, checkpointed):
    """Values and gradients of two forwards and then their backwards, and whether parameters' are those without."""
    gradients = []
    for captured in (False, True):
        model = parallel_model(config, weights, group)
        model.model.choose_layout = LAYOUTS[layout]
        if checkpointed:
            checkpoint_layers(model)
        if captured:
            with capture(model, [*POINTS, "pattern"], gradients=True) as cache:
                losses = [loss_of(model, batch) for batch in batches(config["vocab_size"])]
            kept = [dict(forward.values) for forward in cache.forwards]
        else:
            losses = [loss_of(model, batch) for batch in batches(config["vocab_size"])]
        for loss in losses:
            loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for forward, values in zip(cache.forwards, kept, strict=True):
        assert all(forward.values[site] is value for site, value in values.items())
    values = {key: cache.value(*key) for key in keys_of(model.config.num_layers)}
    of_points = {key: cache.gradient(*key) for key in values}
    patterns = [len(cache["pattern", layer]) for layer in range(model.config.num_layers)]
    paths = identity_and_sublayer_gradients(cache, 1)
    return values, of_points, patterns, paths, all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.fixture(scope="module")
def expected():
    """For each family: values, gradients, and what of layer 1's comes through its attention and its MLP."""
    results = {}
    for family in TINY_CONFIGS:
        model = transformers_model(family)
        found = [_of_row(model, *pair) for batch in batches(model.config.vocab_size) for pair in batch]
        results[family] = [
            {key: torch.cat([of[key] for of in column]) for key in column[0]} for column in zip(*found, strict=True)
        ]
    return results


def _of_row(model, row, labels):
    with hooked(model) as values:
        loss = functional.cross_entropy(model(row[None]).logits[0], labels, reduction="sum")
    gradients = dict(zip(values, torch.autograd.grad(loss, list(values.values()), retain_graph=True), strict=True))
    through = {}
    for write, before, after in (("attn_out", "resid_pre", "resid_mid"), ("mlp_out", "resid_mid", "resid_post")):
        (through[write],) = torch.autograd.grad(
            values[write, 1], values[before, 1], gradients[after, 1], retain_graph=True
        )
    heads = model.config.num_attention_heads
    detached = {key: value.detach() for key, value in values.items()}
    return (
        of_sequence(detached, heads),
        of_sequence(gradients, heads),
        {key: value[0] for key, value in through.items()},
    )


CASES = [(family, t, "shard", False) for family in TINY_CONFIGS for t in (1, 2, 3)]
CASES += [("qwen3", t, "replicate", checkpointed) for t in (2, 3) for checkpointed in (False, True)]
CASES += [("llama", t, "shard", True) for t in (1, 2, 3)]


@pytest.mark.parametrize("family, t, layout, checkpointed", CASES)
def test_values_and_gradients_of_training_are_those_of_autograd(ranks, expected, family, t, layout, checkpointed):
    """Layers that the backward computes again, in another order than the forwards came, are not captured twice."""
    arguments = hub_config(family), transformers_model(family).state_dict(), layout, checkpointed
    expected_values, expected_gradients, through = expected[family]
    for values, gradients, patterns, paths, unchanged in ranks(t).run(_trained, *arguments):
        assert unchanged
        for key, value in values.items():
            assert_close(value, expected_values[key])
            assert_close(gradients[key], expected_gradients[key])
        assert patterns == [sum(map(len, BATCHES))] * TINY_CONFIGS[family]["num_hidden_layers"]
        for path, write, after in ((paths.attention, "attn_out", "resid_mid"), (paths.mlp, "mlp_out", "resid_post")):
            assert torch.equal(path.identity, gradients[after, 1])
            largest = expected_gradients[after, 1].abs().max()
            assert (path.sublayer - through[write]).abs().max() <= 2e-5 * largest
            assert through[write].abs().max() > 0.01 * largest


def test_gradients_of_several_backwards_add_up_and_are_missing_without_any():
    model = parallel_model(hub_config("llama"), transformers_model("llama").state_dict(), TensorParallelGroup.alone())
    (batch, _) = batches(103)
    with capture(model, ["resid_mid"], [0], positions=[0], gradients=True) as cache:
        loss = loss_of(model, batch)
    with pytest.raises(RequestError, match="resid_mid of layer 0 was reached by a gradient in 0 of 1 forwards"):
        cache.gradient("resid_mid", 0)
    loss.backward(retain_graph=True)
    once = cache.gradient("resid_mid", 0)
    loss.backward()
    assert once.shape == (3, 45) and torch.equal(cache.gradient("resid_mid", 0), 2 * once)
    with pytest.raises(RequestError, match="attention patterns are captured without gradients"):
        cache.gradient("pattern", 0)
