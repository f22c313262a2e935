"""Training steps are those of one rank: float64 to 1e-9, whatever the degree, layout and accumulation."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_gradients import LAYOUTS
from test_initialisation import assemble
from tiny_models import hub_config, parallel_model, transformers_model

from tp.layers.parameter import named_parts
from tp.models import CausalLM
from tp.parallel import TensorParallelGroup
from tp.training import check_replicas, checkpoint_layers
from tp.training.data import TrainingBatch
from tp.training.mixed_precision import compute_in
from tp.training.optimizer import adamw
from tp.training.schedule import CosineSchedule
from tp.training.train_step import Learner, LossModule

STEPS = 20
SCHEDULE = CosineSchedule(peak=3e-3, final=1e-4, warmup_steps=4, total_steps=STEPS)


def micro_batches(step, vocab_size, count=6):
    """`count` short sequences of different odd lengths, one a micro-batch; some labels ignored."""
    generator = torch.Generator().manual_seed(1000 + step)
    batches = []
    for index in range(count):
        length = (5, 3, 7, 1, 4, 9)[(step + index) % 6]
        ids = torch.randint(0, vocab_size, (length + 1,), generator=generator)
        labels = ids[1:].clone()
        labels[:: 2 + index] = -100 if length > 2 else labels[:: 2 + index]
        batches.append(TrainingBatch(ids[:-1], labels, (length,)))
    return batches


def joined(batches, size):
    """The same sequences in micro-batches of `size` sequences."""
    return [
        TrainingBatch(
            torch.cat([b.token_ids for b in batches[i : i + size]]),
            torch.cat([b.labels for b in batches[i : i + size]]),
            tuple(n for b in batches[i : i + size] for n in b.sequence_lengths),
        )
        for i in range(0, len(batches), size)
    ]


def learner_for(model, data_parallel=None):
    optimizer = adamw(model, learning_rate=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    return Learner(model, optimizer, data_parallel, max_grad_norm=1.0)


def weights_of(model):
    return [
        (part.name, part.dim, part.global_start, part.global_length, parameter.slice_of(part).detach().clone())
        for parameter in named_parts(model)
        for part in parameter.parts
    ]


def _train(group, config, weights, layout, accumulation, prepare=None):
    model = parallel_model(config, weights, group, torch.float64)
    model.model.choose_layout = LAYOUTS[layout]
    if prepare == "checkpoint":
        checkpoint_layers(model)
    learner = learner_for(model)
    losses = []
    for step in range(STEPS):
        batches = joined(micro_batches(step, config["vocab_size"]), 6 // accumulation)
        losses.append(learner.step(batches, SCHEDULE(step)).loss)
    check_replicas(model, group)
    return losses, weights_of(model)


@pytest.fixture(scope="module")
def alone():
    """Losses and weights of one rank, for each family."""
    found = {}
    for family in ("qwen3", "llama"):
        weights = transformers_model(family).double().state_dict()
        config = hub_config(family)
        losses, pieces = _train(TensorParallelGroup.alone(), config, weights, "replicate", 1)
        found[family] = config, weights, losses, assemble([pieces])
    return found


@pytest.mark.parametrize(
    "family, t, layout, accumulation",
    [
        ("qwen3", 2, "replicate", 1),
        ("llama", 3, "replicate", 3),
        ("llama", 3, "shard", 1),
        ("qwen3", 4, "replicate", 1),
        ("qwen3", 4, "shard", 3),
    ],
)
def test_twenty_adamw_steps_equal_those_of_one_rank(ranks, alone, family, t, layout, accumulation):
    config, weights, expected_losses, expected = alone[family]
    moved = max((expected[name] - weights[name]).abs().max() for name in expected)
    assert moved > 0.01, "weights that stay where they are prove little"
    outcomes = ranks(t).run(_train, config, weights, layout, accumulation)
    for losses, _ in outcomes:
        assert max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True)) <= 1e-9
    gathered = assemble([pieces for _, pieces in outcomes])
    assert gathered.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (gathered[name] - tensor).abs().max() <= 1e-9, name


def _two_by_two(group, config, weights):
    """Data parallel outside, tensor parallel inside, on a device mesh."""
    mesh = dist.device_mesh.init_device_mesh(group.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    inner, outer = (TensorParallelGroup.from_device_mesh(mesh, dim) for dim in ("tp", "dp"))
    model = parallel_model(config, weights, inner, torch.float64)
    learner = learner_for(model, outer)
    losses = []
    for step in range(STEPS):
        batches = joined(micro_batches(step, config["vocab_size"]), 1)
        losses.append(learner.step(batches[3 * outer.rank : 3 * outer.rank + 3], SCHEDULE(step)).loss)
    return losses


def test_two_by_two_has_the_losses_of_one_process(ranks, alone):
    config, weights, expected, _ = alone["qwen3"]
    for losses in ranks(4).run(_two_by_two, config, weights):
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= 1e-9


def _bfloat16_norms(group, config, weights):
    """Gradient norms of bfloat16 compute over float32 parameters, in either layout."""
    norms = []
    for layout in LAYOUTS.values():
        model = parallel_model(config, weights, group)
        model.model.choose_layout = layout
        compute_in(model, torch.bfloat16)
        learner = learner_for(model)
        for step in range(3):
            report = learner.step(joined(micro_batches(step, config["vocab_size"]), 2), 1e-3)
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
        assert "weight" not in model.model.norm.__dict__
        norms.append(report.grad_norm)
    return norms


def test_bfloat16_gradient_norms_with_and_without_sequence_parallelism(ranks):
    config, weights = hub_config("qwen2"), transformers_model("qwen2").state_dict()
    for replicated, sharded in ranks(4).run(_bfloat16_norms, config, weights):
        assert sharded == pytest.approx(replicated, rel=0.01)


def test_low_precision_compute_keeps_float32_parameters_close():
    """The gradient of bfloat16 compute is the float32 gradient up to bfloat16's rounding."""
    config, weights = hub_config("llama"), transformers_model("llama").state_dict()
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        model = parallel_model(config, weights, TensorParallelGroup.alone())
        compute_in(model, dtype)
        learner_for(model).step(micro_batches(0, config["vocab_size"]), 0.0)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert 1e-4 < error < 0.05


def _odd_vocabulary(group, steps):
    """TINY with vocabulary 97 under plain SGD: `labels` in the padding or a shifted chunk would move the loss."""
    config = {
        "model_type": "qwen2",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": 97,
        "tie_word_embeddings": True,
    }
    from tp.config import ModelConfig
    from tp.models import initialise_parameters

    model = CausalLM(ModelConfig.from_hf(config), group, dtype=torch.float64)
    initialise_parameters(model, seed=0)
    learner = Learner(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return [learner.step(joined(micro_batches(s, 97), 6), 0.1).loss for s in range(steps)]


@pytest.mark.parametrize("t", [2, 4])
def test_an_odd_vocabulary_has_the_loss_of_one_rank_for_fifty_steps(ranks, t):
    expected = _odd_vocabulary(TensorParallelGroup.alone(), 50)
    for losses in ranks(t).run(_odd_vocabulary, 50):
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= 1e-9


def test_the_schedule_warms_up_and_ends_at_its_last_rate():
    schedule = CosineSchedule(peak=1.0, final=0.1, warmup_steps=2, total_steps=6)
    rates = [schedule(step) for step in range(8)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[4] == pytest.approx(0.55)
    assert rates[6:] == pytest.approx([0.1, 0.1])


def _fully_sharded(group, config, weights):
    """FSDP2 over two data-parallel ranks around two tensor-parallel ones: whole gradients of this rank's share."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh(group.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    inner, outer = (TensorParallelGroup.from_device_mesh(mesh, dim) for dim in ("tp", "dp"))
    batches = joined(micro_batches(0, config["vocab_size"]), 3)
    results = []
    for sharded in (False, True):
        model = parallel_model(config, weights, inner, torch.float64).train()
        module = LossModule(model)
        if sharded:
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(module, mesh=mesh["dp"])
            (module(batches[outer.rank], 7) * outer.size).backward()  # FSDP averages; we want the sum
            gradients = [p.grad.full_tensor() for p in model.parameters()]
        else:
            for batch in batches:
                module(batch, 7).backward()
            gradients = [p.grad for p in model.parameters()]
        results.append(gradients)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_fsdp2_sees_finished_gradients(ranks, family):
    """Shared KV heads, norms under sequence parallelism and q/k norms are summed before FSDP reduces."""
    ranks(4).run(_fully_sharded, hub_config(family), transformers_model(family).double().state_dict())
