"""What the planner counts is what the engine does: parameters, cache, products, and every collective of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from norm_placement_models import COMBINATIONS, placement_config
from tiny_models import TINY_CONFIGS, hub_config

from tp.checkpoint import weight_bytes
from tp.config import ModelConfig
from tp.layers import KVCache, Replicate, ShardTokens
from tp.models import CausalLM, prepare_for_inference
from tp.parallel import TensorParallelGroup
from tp.parallel.communicator import AloneCommunicator
from tp.planning.hardware import load_profile
from tp.planning.parameters import RankModel, RankParameters
from tp.planning.precision import Precision
from tp.planning.step_collectives import Collective
from tp.planning.step_time import alike_time, step_time, total
from tp.planning.work import decode_work, prefill_pieces, prefill_steps, prefill_work, training_work

CONFIGS = {family: hub_config(family) for family in TINY_CONFIGS} | {
    "_".join(map(str, case)): placement_config(*case) for case in COMBINATIONS
}


def rank_of(tp_size: int, rank: int) -> TensorParallelGroup:
    """A rank that has no peers, for models that are only built."""
    communicator = AloneCommunicator()
    communicator.rank, communicator.size = rank, tp_size
    return TensorParallelGroup(communicator)


def rank_model(config: ModelConfig, tp_size: int, rank: int = 0, dtype: str = "float32") -> RankModel:
    return RankModel(config, RankParameters.of(config, tp_size, rank), tp_size, Precision.of(dtype))


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_and_cache_are_those_of_the_modules_at_every_degree(name):
    config = ModelConfig.from_hf(CONFIGS[name])
    for t in (1, 2, 3, 4, 5):
        for rank in range(t):
            group = rank_of(t, rank)
            model = CausalLM(config, group, dtype=torch.bfloat16, device="meta")
            held = RankParameters.of(config, t, rank)
            assert held.elements == sum(p.numel() for p in model.parameters())
            assert held.nbytes(Precision.of("bfloat16")) == weight_bytes(model)
            planned = rank_model(config, t, rank, "bfloat16").cache_bytes(3, 17)
            assert planned == KVCache.bytes_needed(config, group, 3, 17, torch.bfloat16)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_int8_weights_are_those_of_the_modules(family):
    """Untied and tied: a tied head is one matrix with one set of scales."""
    config = ModelConfig.from_hf(hub_config(family))
    model = CausalLM(config, dtype=torch.bfloat16)
    prepare_for_inference(model, "int8")
    assert RankParameters.of(config, 1, 0).nbytes(Precision.of("bfloat16", "int8")) == weight_bytes(model)


def _counted(group, config, layout, batch, prompt):
    """(calls, bytes) of a generation's prefill, of each of its decode steps, and of all of it."""
    from tp.generation import GenerationOptions, LanguageModel
    from tp.models import initialise_parameters

    model = LanguageModel(ModelConfig.from_hf(config), group)
    initialise_parameters(model, seed=0)
    model.model.choose_layout = layout
    statistics = group.communicator.statistics
    options = GenerationOptions(max_new_tokens=3, ignore_eos=True, prefill_chunk=8)
    stream = model.eval().generate_stream([[5] * prompt] * batch if group.rank == 0 else None, options)
    counts = []
    statistics.reset()
    for index, _ in enumerate(stream):
        if index % batch == batch - 1:
            counts.append((statistics.calls, statistics.bytes))
    return counts


def _sums(collectives: tuple[Collective, ...]) -> tuple[int, int]:
    return sum(c.count for c in collectives), sum(c.count * c.nbytes for c in collectives)


@pytest.mark.parametrize("t", [2, 3])
@pytest.mark.parametrize("layout", [Replicate, ShardTokens])
def test_collectives_of_prefill_and_decode_are_those_that_are_entered(ranks, t, layout):
    config, batch, prompt = hub_config("qwen2"), 2, 11
    counts = ranks(t).run(_counted, config, layout, batch, prompt)[0]
    model = rank_model(ModelConfig.from_hf(config), t)
    steps = prefill_work(model, batch, prompt, 8, lambda num_tokens: layout is ShardTokens)
    assert [len(pieces) for pieces in prefill_pieces(batch, prompt, 8)] == [1, 2, 1]
    prefill = [sum(parts) for parts in zip(*(_sums(step.collectives) for step in steps), strict=True)]
    assert counts[0] == tuple(prefill)
    decode = _sums(decode_work(model, batch, prompt + 1, sharded=layout is ShardTokens).collectives)
    assert decode == tuple(after - before for before, after in zip(*counts[1:], strict=True))  # the first is captured


def _counted_in_training(group, config, layout, recomputed, rows, length):
    from tp.models import initialise_parameters
    from tp.training.activation_checkpointing import checkpoint_layers
    from tp.training.data.packing import TrainingBatch
    from tp.training.optimizer import adamw
    from tp.training.train_step import Learner

    model = CausalLM(ModelConfig.from_hf(config), group)
    initialise_parameters(model, seed=0)
    model.model.choose_layout = layout
    if recomputed:
        checkpoint_layers(model)
    learner = Learner(model, adamw(model, learning_rate=1e-3, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.0))
    ids = torch.arange(rows * length) % config["vocab_size"]
    batch = TrainingBatch(ids, ids.clone(), (length,) * rows)
    group.communicator.statistics.reset()
    learner.step([batch], 1e-3)
    return group.communicator.statistics.calls, group.communicator.statistics.bytes


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("layout", [Replicate, ShardTokens])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_collectives_of_a_training_step_are_those_that_are_entered(ranks, family, layout, recomputed):
    config = hub_config(family)
    counted = ranks(2).run(_counted_in_training, config, layout, recomputed, 2, 13)[0]
    model = rank_model(ModelConfig.from_hf(config), 2)
    work = training_work(model, 2, 13, sharded=layout is ShardTokens, recomputed=recomputed)
    assert counted == _sums(work.collectives)


def test_a_long_prefill_is_worked_out_once_for_all_steps_that_are_alike():
    """Chunks that fall into prompts at ever other places, whose attention differs, and a window in one layer."""
    plain = ModelConfig.from_hf(hub_config("llama"))
    windows = (7, *(None,) * (plain.num_layers - 1))
    profile, model = load_profile("h100"), rank_model(replace(plain, sliding_windows=windows), 1, dtype="bfloat16")
    for batch, prompt, chunk in ((5, 23, 8), (3, 4, 16), (2, 64, 16), (1, 31, 1)):
        alike = prefill_steps(model, batch, prompt, chunk)
        each = [step for steps in alike for step in steps.each()]
        assert len(each) == len(prefill_pieces(batch, prompt, chunk))
        together = total([alike_time(steps, model.precision, profile, 1, 1) for steps in alike])
        apart = total([step_time(step, model.precision, profile, 1, 1) for step in each])
        assert vars(together) == pytest.approx(vars(apart), rel=1e-12)
        assert sum(step.products[0].rows for step in each) == batch * prompt
        if chunk > 1:
            seen = sum(min(window or prompt, token) for window in windows for token in range(1, prompt + 1))
            assert sum(step.attention_flops for step in each) == 4 * model.query_width * batch * seen
    assert len(prefill_steps(model, 1, 5000, 1)) == 2  # of 5,000 steps, one gives a token
