"""Clipping, replica checks, activation checkpointing and dropout: the same as on one rank."""

from __future__ import annotations

import pytest
import torch
from test_gradients import LAYOUTS, LENGTHS, assemble, batch
from tiny_models import hub_config, parallel_model, transformers_model
from torch import nn
from torch.nn import functional

from tp.errors import CommunicationError
from tp.kernels.dropout import keep_mask
from tp.layers import RMSNorm, RowParallelLinear, SequenceSlice, ShardTokens, Step
from tp.layers.parameter import named_parts
from tp.training import check_replicas, checkpoint_layers, clip_grad_norm_, grad_norm


def _three_four_twelve(group):
    """A split gradient [3 | 4] and a replicated one [12]."""
    model = nn.ModuleDict({"row": RowParallelLinear(2, 1, group), "norm": RMSNorm(1, 1e-5, group)})
    model["row"].weight.grad = torch.tensor([[3.0 + group.rank]])
    model["norm"].weight.grad = torch.tensor([12.0])
    norm = clip_grad_norm_(model, 6.5, group)
    return (
        norm.item(),
        grad_norm(model, group).item(),
        model["row"].weight.grad.item(),
        model["norm"].weight.grad.item(),
    )


def test_a_replicated_gradient_is_counted_once_and_all_are_scaled(ranks):
    """Counted on each rank the norm would be 17.6918."""
    for rank, (norm, after, split, replicated) in enumerate(ranks(2).run(_three_four_twelve)):
        assert norm == 13.0
        assert after == pytest.approx(6.5, rel=1e-6)
        assert split == [1.5, 2.0][rank]
        assert replicated == 6.0


def _model_after_backward(group, config, weights, layout="shard", prepare=lambda model: None, dropout_seed=None):
    model = parallel_model(config, weights, group, torch.float64).train()
    model.model.choose_layout = LAYOUTS[layout]
    prepare(model)
    ids, labels = batch(config["vocab_size"])
    step = Step(ids, tuple(SequenceSlice(length) for length in LENGTHS), dropout_seed)
    logits = model.lm_head(model.model.final_norm(model.model(step))).whole()
    loss = functional.cross_entropy(logits, labels)
    loss.backward()
    return model, loss.item()


def _norms(group, config, weights):
    model, _ = _model_after_backward(group, config, weights)
    before = grad_norm(model, group).item()
    return before, clip_grad_norm_(model, before / 2, group).item(), grad_norm(model, group).item()


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_shared_kv_heads_and_tied_embeddings_count_once(ranks, family):
    reference = transformers_model(family).double()
    config, weights = hub_config(family), reference.state_dict()
    ((expected, *_),) = ranks(1).run(_norms, config, weights)
    for before, returned, after in ranks(4).run(_norms, config, weights):
        assert before == pytest.approx(expected, rel=1e-12)
        assert returned == before
        assert after == pytest.approx(expected / 2, rel=1e-12)


def _replicas(group, config, weights, fault):
    model, _ = _model_after_backward(group, config, weights)
    check_replicas(model, group)
    if fault == "gradient" and group.rank == 1:
        model.model.layers[1].input_layernorm.weight.grad[3] += 1e-9
    if fault == "value" and group.rank == 2:
        model.model.layers[0].self_attn.qkv_proj.weight.data[-1, 0] += 1e-9
    try:
        check_replicas(model, group)
    except CommunicationError as error:
        return str(error)


def test_a_replica_that_differs_is_named(ranks):
    config, weights = hub_config("qwen2"), transformers_model("qwen2").double().state_dict()
    assert ranks(4).run(_replicas, config, weights, None) == [None] * 4
    for message in ranks(4).run(_replicas, config, weights, "gradient"):
        assert message.startswith("the gradient of model.layers.1.input_layernorm.weight differs between ranks 0 and 1")
    for message in ranks(4).run(_replicas, config, weights, "value"):
        assert message.startswith("the value of model.layers.0.self_attn.v_proj.weight differs between ranks 2 and 3")


def _checkpointed(group, config, weights, layout):
    plain, loss = _model_after_backward(group, config, weights, layout)
    again, loss_again = _model_after_backward(group, config, weights, layout, checkpoint_layers)
    assert loss == loss_again
    for (name, p), (_, q) in zip(plain.named_parameters(), again.named_parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("t", [1, 3])
def test_checkpointed_layers_have_the_gradients_of_plain_ones(ranks, t, layout):
    ranks(t).run(_checkpointed, hub_config("qwen3"), transformers_model("qwen3").double().state_dict(), layout)


def _with_dropout(group, config, weights, layout, seed):
    model, loss = _model_after_backward(group, config, weights, layout, dropout_seed=seed)
    pieces = [
        (part.name, part.dim, part.global_start, part.global_length,
         parameter.tensor.grad.narrow(part.dim, part.local_start, part.length))
        for parameter in named_parts(model)
        for part in parameter.parts
    ]  # fmt: skip
    return loss, pieces


def test_dropout_masks_are_the_same_at_every_degree_and_layout(ranks):
    config = hub_config("mistral", attention_dropout=0.3)
    weights = transformers_model("mistral").double().state_dict()
    ((expected, pieces),) = ranks(1).run(_with_dropout, config, weights, "replicate", 7)
    gradients = assemble([pieces])
    assert ranks(1).run(_with_dropout, config, weights, "replicate", 8)[0][0] != pytest.approx(expected, rel=1e-3)
    assert ranks(1).run(_with_dropout, config, weights, "replicate", None)[0][0] != pytest.approx(expected, rel=1e-3)
    for t in (2, 3, 4):
        for layout in LAYOUTS:
            outcomes = ranks(t).run(_with_dropout, config, weights, layout, 7)
            assert outcomes[0][0] == pytest.approx(expected, rel=1e-12)
            for name, gradient in assemble([pieces for _, pieces in outcomes]).items():
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-10, atol=1e-12, msg=name)


def test_dropout_drops_its_share_independently_along_every_index():
    rows, columns = torch.arange(300).unsqueeze(-1), torch.arange(400)
    kept = keep_mask(1, 2, rows, columns, 0.25)
    assert abs(kept.float().mean() - 0.75) < 0.005
    for other in (
        keep_mask(2, 2, rows, columns, 0.25),
        keep_mask(1, 3, rows, columns, 0.25),
        kept.roll(1, 0),
        kept.roll(1, 1),
    ):
        assert abs((kept & other).float().mean() - 0.75**2) < 0.005


def _adam(group, config, weights):
    """Ten Adam steps under sequence parallelism; replicated parameters must stay the same bits."""
    model = parallel_model(config, weights, group)
    model.model.choose_layout = ShardTokens
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ids, labels = batch(config["vocab_size"])
    for _ in range(10):
        optimizer.zero_grad()
        step = Step(ids, tuple(SequenceSlice(length) for length in LENGTHS))
        functional.cross_entropy(model.lm_head(model.model.final_norm(model.model(step))).whole(), labels).backward()
        optimizer.step()
    check_replicas(model, group)


@pytest.mark.parametrize("t", [2, 4])
def test_replicas_stay_bitwise_equal_over_ten_adam_steps(ranks, t):
    ranks(t).run(_adam, hub_config("qwen3"), transformers_model("qwen3").state_dict())
