"""Norm placements in training: losses and gradients of a plain reference, saving, initialisation, and a whole run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_samples import assert_same_tensors, load, on_ranks
from norm_placement_models import COMBINATIONS, NORMS, PLACEMENTS, placement_config, reference_model
from safetensors.torch import load_file
from test_gradients import LAYOUTS, LENGTHS, _gradients, assembled, assert_gradients, batch
from test_initialisation import _pieces, assemble
from test_launch_commands import LAUNCH, finish, start
from test_train_step import joined, learner_for, micro_batches, weights_of
from tiny_models import parallel_model
from torch.nn import functional

from tp.checkpoint import open_checkpoint, save_checkpoint
from tp.config import ModelConfig
from tp.models import CausalLM, initialise_parameters
from tp.models.initialisation import xavier_normal
from tp.parallel import TensorParallelGroup
from tp.training import check_replicas, checkpoint_layers
from tp.training.flops import training_flops_per_token
from tp.training.metrics import read_metrics
from tp.training.mixed_precision import compute_in

ADAM_STEPS = 10


def reference_gradients(config):
    """Loss and every gradient of the reference in float64, by Hub names."""
    reference = reference_model(config).double()
    ids, labels = batch(config["vocab_size"])
    logits = torch.cat([reference(row) for row in ids.split(LENGTHS)])
    loss = functional.cross_entropy(logits, labels)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in reference.named_parameters()}


CASES = [  # every placement and norm sharded at t = 3, where nothing divides; each placement at the others
    *((*combination, 3, "shard") for combination in COMBINATIONS),
    *((placement, "layer_norm", False, t, "shard") for placement in PLACEMENTS for t in (2, 4)),
    *((placement, norm, False, 3, "replicate") for placement, norm in zip(PLACEMENTS, NORMS + NORMS[:1], strict=True)),
]


@pytest.mark.parametrize("placement, norm, gated, t, layout", CASES)
def test_gradients_equal_those_of_the_reference_in_float64(ranks, placement, norm, gated, t, layout):
    """Ranks that hold the same parameter, as all do every norm's weight and bias, have bitwise the same gradient."""
    config = placement_config(placement, norm, gated)
    weights = reference_model(config).double().state_dict()
    expected_loss, expected = reference_gradients(config)
    outcomes = ranks(t).run(_gradients, config, weights, layout, torch.float64, LENGTHS)
    loss, gradients = assembled(outcomes)
    assert abs(loss - expected_loss) <= 1e-9
    assert_gradients(gradients, expected, 1e-9)


def _steps(group, config, weights, layout, checkpointing):
    """Losses and weights of `ADAM_STEPS` steps of AdamW; weights that ranks share must stay the same bits."""
    model = parallel_model(config, weights, group, torch.float64)
    model.model.choose_layout = LAYOUTS[layout]
    if checkpointing:
        checkpoint_layers(model)
    learner = learner_for(model)
    losses = [learner.step(joined(micro_batches(step, 97), 3), 3e-3).loss for step in range(ADAM_STEPS)]
    check_replicas(model, group)
    return losses, weights_of(model)


@pytest.mark.parametrize(
    "placement, norm, t, layout, checkpointing",
    [
        ("pre", "layer_norm", 2, "shard", True),
        ("post", "layer_norm", 3, "shard", False),
        ("post", "rms_norm", 3, "shard", True),
        ("sandwich", "layer_norm", 3, "shard", True),
        ("sandwich", "rms_norm", 2, "replicate", True),
    ],
)
def test_adamw_steps_equal_those_of_one_rank(ranks, placement, norm, t, layout, checkpointing):
    config = placement_config(placement, norm, gated=norm == "rms_norm")
    weights = reference_model(config).double().state_dict()
    expected_losses, pieces = _steps(TensorParallelGroup.alone(), config, weights, "replicate", False)
    expected = assemble([pieces])
    assert all((expected[name] - weights[name]).abs().max() > 1e-3 for name in expected)
    outcomes = ranks(t).run(_steps, config, weights, layout, checkpointing)
    for losses, _ in outcomes:
        assert max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True)) <= 1e-9
    for name, tensor in assemble([pieces for _, pieces in outcomes]).items():
        assert (tensor - expected[name]).abs().max() <= 1e-9, name


def test_low_precision_compute_keeps_the_norms_parameters_float32():
    config = placement_config("sandwich", "layer_norm", False)
    weights = reference_model(config).state_dict()
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        model = parallel_model(config, weights, TensorParallelGroup.alone())
        compute_in(model, dtype)
        learner_for(model).step(micro_batches(0, 97), 0.0)
        norm = model.model.layers[0].post_attention_layernorm
        assert norm.bias.dtype == norm.bias.grad.dtype == torch.float32
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert 1e-4 < error < 0.1


@pytest.mark.parametrize(
    "placement, norm, gated",
    [("post", "layer_norm", False), ("sandwich", "rms_norm", True), ("sandwich", "layer_norm", False)],
)
def test_what_is_saved_is_read_at_any_degree(tmp_path: Path, placement, norm, gated) -> None:
    """From 3 ranks to 2, to 4, to 1: the same bits under the same names, and the same configuration."""
    config = placement_config(placement, norm, gated)
    tensors = {name: tensor.clone() for name, tensor in reference_model(config).state_dict().items()}
    on_ranks(3, lambda group: save_checkpoint(parallel_model(config, tensors, group), tmp_path / "3"))
    path = tmp_path / "3"
    for tp_size in (2, 4, 1):
        target = tmp_path / str(tp_size)
        on_ranks(tp_size, lambda group, path=path, target=target: save_checkpoint(load(path, group)[0], target))
        path = target
        assert_same_tensors(load_file(path / "model.safetensors"), tensors)
        read = open_checkpoint(path, TensorParallelGroup.alone()).config
        assert read == ModelConfig.from_hf(config | {"dtype": "float32"})


@pytest.mark.parametrize("placement, norm, gated", [("post", "layer_norm", False), ("sandwich", "layer_norm", True)])
def test_initial_weights_are_bitwise_equal_at_every_degree(ranks, placement, norm, gated):
    config = placement_config(placement, norm, gated)
    expected = assemble(ranks(1).run(_pieces, config))
    assert expected.keys() == reference_model(config).state_dict().keys()
    for name, tensor in expected.items():
        if tensor.dim() == 1:
            assert (tensor == float("norm.weight" in name)).all(), name
        else:
            assert 0.01 < tensor.std() < 0.03, name
    for t in (2, 3, 4):
        assert_same_tensors(assemble(ranks(t).run(_pieces, config)), expected)


def _drawn_by_rule(group, config):
    """This rank's pieces by Xavier's rule and with deviation 1, and the shapes that a rule is asked about."""
    model = CausalLM(ModelConfig.from_hf(config), group)
    asked = {}
    drawn = []
    for std in (1.0, xavier_normal, lambda name, shape: asked.setdefault(name, shape)[0]):
        initialise_parameters(model, 7, std)
        drawn.append(weights_of(model))
    return drawn[0], drawn[1], asked


def test_deviations_are_given_by_a_rule_of_names_and_global_shapes(ranks):
    """So they cannot depend on what a rank holds."""
    config = placement_config("post", "layer_norm", False)
    shapes = {name: tuple(tensor.shape) for name, tensor in reference_model(config).state_dict().items()}
    for t in (1, 3):
        units, xavier, asked = zip(*ranks(t).run(_drawn_by_rule, config), strict=True)
        units, xavier = assemble(units), assemble(xavier)
        for name, shape in shapes.items():
            deviation = (2 / (shape[0] + shape[1])) ** 0.5 if len(shape) == 2 else 1.0
            assert torch.equal(xavier[name], units[name] * deviation), name
            assert all(of_rank[name] == shape for of_rank in asked if name in of_rank), name
        assert set().union(*asked) == {name for name, shape in shapes.items() if len(shape) == 2}


def test_a_plain_mlp_has_two_matrices_of_operations():
    gated, plain = (ModelConfig.from_hf(placement_config("pre", "rms_norm", choice)) for choice in (True, False))
    saved = training_flops_per_token(gated, 64) - training_flops_per_token(plain, 64)
    assert saved == 6 * gated.num_layers * gated.hidden_size * gated.intermediate_size


@pytest.mark.long
def test_a_run_is_trained_on_two_ranks_resumed_on_three_and_generated_from(tmp_path: Path) -> None:
    config = placement_config("post", "layer_norm", False, hidden_size=24, head_dim=6, num_hidden_layers=2)
    (tmp_path / "config.json").write_text(json.dumps(config))
    texts = [f"the {n} quick foxes jump over {n * n} lazy dogs. " * 4 for n in range(12)]
    (tmp_path / "text.txt").write_text("\n<|document|>\n".join(texts))
    output = tmp_path / "run"
    data = ["--data", str(tmp_path / "text.txt"), "--data-cache", str(tmp_path / "cache"), "--device", "cpu"]
    recipe = ["--sequence-length", "16", "--batch-size", "4", "--train-tokenizer", "300", "--steps", "12"]
    begin = ["train", "--config", str(tmp_path / "config.json"), *data, *recipe, "--save-every", "6", "--json"]
    status, out, err = finish(start([*LAUNCH, *begin, "--output", str(output), "--tp", "2"]))
    assert status == 0, err
    whole = json.loads(out)["checkpoint"]
    expected = [record["loss"] for record in read_metrics(output / "metrics.jsonl")]
    assert whole == str(output / "step-00000012") and expected[-1] < expected[0]
    (output / "step-00000012").rename(tmp_path / "whole")

    resume = ["train", *data, "--output", str(output), "--resume", "--tp", "3"]
    status, _, err = finish(start([*LAUNCH, *resume]))
    assert status == 0, err
    losses = [record["loss"] for record in read_metrics(output / "metrics.jsonl")]
    assert losses == pytest.approx(expected, rel=1e-4)
    first, second = (load_file(path / "model.safetensors") for path in (tmp_path / "whole", output / "step-00000012"))
    assert first.keys() == second.keys() and "model.norm.weight" not in first
    assert "model.layers.1.post_feedforward_layernorm.bias" in first

    ids = []
    for tp_size in ("1", "2"):
        command = ["generate", "--model", str(output / "step-00000012"), "--tp", tp_size, "--device", "cpu", "--json"]
        status, out, err = finish(start([*LAUNCH, *command, "--prompt", "the 3 quick", "--max-new-tokens", "8"]))
        assert status == 0, err
        ids.append(json.loads(out)["sequences"][0]["new_ids"])
    assert ids[0] == ids[1] and len(ids[0]) == 8
