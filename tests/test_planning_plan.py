"""The plan of a model: what fits and what just does not, how parts add up, which degree is best, and the profiles."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tiny_models import hub_config

from tp.checkpoint.memory import largest
from tp.config import ModelConfig
from tp.errors import CapacityError, ConfigError, RequestError
from tp.planning.hardware import ANY_DEGREE, Profile, load_profile, profile_names
from tp.planning.plan import (
    Workload,
    decode_time,
    fastest,
    most_productive,
    plan_serving,
    plan_training,
    prefill_time,
    serving_placement,
    speed_up,
    training_placement,
)
from tp.planning.precision import Precision
from tp.rope_config import RopeConfig

SEVEN_B = ModelConfig(
    model_type="llama",
    hidden_size=4096,
    num_layers=32,
    num_attention_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    max_position_embeddings=131072,
    rope=RopeConfig(),
)
BFLOAT16 = Precision.of("bfloat16")


def workload(**changes) -> Workload:
    return replace(Workload(SEVEN_B, BFLOAT16, load_profile("H100"), context=8192), **changes)


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_is_complete_and_survives_being_written(name, tmp_path):
    profile = load_profile(name)
    (tmp_path / "copy.json").write_text(profile.to_json())
    assert load_profile(str(tmp_path / "copy.json")) == profile
    assert {"read", "matrix"} <= set(profile.sources) or "all" in profile.sources
    assert all(len(text) > 3 for text in profile.sources.values())
    for tp_size in [degree or 2 for degree in profile.rates]:
        plan = plan_serving(workload(profile=profile, context=1024), tp_size)
        assert plan.decode.seconds > 0 and plan.prefill.seconds > plan.decode.seconds


def test_the_parts_of_a_step_are_its_time_and_collectives_cost_only_where_there_are_peers():
    for tp_size in (1, 8):
        step = decode_time(workload(), tp_size)
        assert step.seconds == pytest.approx(sum(vars(step).values()))
        assert (step.latency_s > 0) == (step.bandwidth_s > 0) == (tp_size > 1)
    assert step.optimizer_s == 0


def test_a_decode_step_reads_all_weights_once():
    """8 billion parameters but the embedding, in bfloat16, at the profile's rate."""
    rates = load_profile("H100").rates[ANY_DEGREE]
    parameters = workload().ranks(1)[0].parameters
    read = 2 * (parameters.elements - parameters.embedding.elements - 65 * 4096)
    assert decode_time(workload(), 1).products_s == pytest.approx(read / rates.read_bytes_per_s)


@pytest.mark.parametrize(
    "sharded, batch, shards", [(None, 256, False), (None, 512, True), (True, 2, True), (False, 512, False)]
)
def test_decode_steps_lie_as_the_layout_has_them(sharded, batch, shards):
    for tp_size in (1, 4):
        plan = plan_serving(workload(sharded=sharded, batch=batch), tp_size)
        operations = {each.operation for each in plan.decode_collectives}
        assert ("reduce_scatter" in operations) == (shards and tp_size > 1)


@pytest.mark.parametrize(
    "sharded, chunk, shards", [(None, 256, False), (None, 512, True), (True, 256, True), (False, 512, False)]
)
def test_prefill_steps_lie_as_the_layout_has_them(sharded, chunk, shards):
    for tp_size in (1, 4):
        plan = plan_serving(workload(sharded=sharded, chunk=chunk), tp_size)
        operations = {each.operation for each in plan.prefill_collectives}
        assert ("reduce_scatter" in operations) == (shards and tp_size > 1)


@pytest.mark.parametrize(
    "changes, batch, sharded, captured",
    [
        ({}, 1, None, True),
        ({}, 33, None, False),
        ({}, 2, True, False),
        ({"activation": "gelu"}, 1, None, False),
        ({"model_type": "tp_decoder", "norm": "layer_norm"}, 1, None, False),
        ({"rope": RopeConfig(rope_type="dynamic", factor=2.0)}, 1, None, False),
    ],
)
def test_a_decode_step_costs_as_much_as_its_kernels_can_be_captured(changes, batch, sharded, captured):
    profile = load_profile("two-core-cpu")
    asked = workload(config=replace(SEVEN_B, **changes), profile=profile, batch=batch, sharded=sharded)
    rates = profile.rates_of(2)
    expected = rates.captured_step_s if captured else rates.eager_step_s
    assert rates.captured_step_s != rates.eager_step_s
    assert decode_time(asked, 2).step_s == expected
    assert decode_time(replace(asked, sharded=True), 1).step_s == decode_time(replace(asked, sharded=False), 1).step_s


def test_many_rows_are_limited_by_multiplying():
    few, many = (decode_time(workload(batch=batch), 1).products_s for batch in (1, 128))
    assert many == pytest.approx(few), "128 rows are below the roofline's ridge"
    qkv, o, up, down = (matrix.elements for matrix in workload().ranks(1)[0].parameters.layer_matrices)
    flops = 2 * 8192 * (32 * qkv + 31 * (o + up + down))  # the last ones see the last token alone
    rates = load_profile("H100").rates[ANY_DEGREE]
    of_last_token = 2 * (o + up + down + workload().ranks(1)[0].parameters.head.elements) / rates.read_bytes_per_s
    expected = flops / rates.flops_per_s("bfloat16", 512) + of_last_token
    assert prefill_time(workload(), 1).products_s == pytest.approx(expected, rel=1e-4)


def test_rates_between_two_points_lie_on_a_line_in_logarithms():
    rates = replace(load_profile("H100").rates[ANY_DEGREE], matrix_flops_per_s={"bfloat16": ((1, 1e9), (100, 1e11))})
    found = [rates.flops_per_s("bfloat16", rows) for rows in (1, 10, 100, 1000)]
    assert found == pytest.approx([1e9, 1e10, 1e11, 1e11])
    with pytest.raises(RequestError, match="no matrix rate for dtype float64: it has bfloat16"):
        rates.flops_per_s("float64", 1)


@pytest.mark.parametrize("tp_size", [1, 2, 3, 8])
def test_the_largest_batch_and_context_fit_and_one_more_does_not(tp_size):
    asked = workload(profile=replace(load_profile("H100"), memory_bytes=30_000_000_000))
    plan = plan_serving(asked, tp_size)
    for field, most, limit in (
        ("batch", plan.largest_batch, 1 << 20),
        ("context", plan.largest_context, SEVEN_B.longest_context),
    ):
        assert 0 < most <= limit
        assert serving_placement(replace(asked, **{field: most}), tp_size).fits
        assert most == limit or not serving_placement(replace(asked, **{field: most + 1}), tp_size).fits


def test_the_cache_is_that_of_the_sequences_on_every_device():
    """Captured steps pad with slots that their batch leaves over: no device needs more."""
    for device in ("cpu", "cuda"):
        asked = workload(profile=replace(load_profile("H100"), device=device), batch=3, context=1000)
        model = asked.ranks(1)[0]
        assert serving_placement(asked, 1).worst.cache == model.cache_bytes(3, 1000)


def test_largest_searches_all_of_its_range():
    for most in range(6):
        for limit in range(most + 2):
            assert largest(lambda count, limit=limit: count <= limit, most) == min(limit, most)


def test_what_does_not_fit_says_how_much_is_missing():
    small = workload(profile=replace(load_profile("H100"), memory_bytes=16_000_000_000))
    placement = serving_placement(small, 1)
    assert placement.short == placement.worst.total - 16_000_000_000 > 0
    assert serving_placement(small, 8).short == 0
    whole = placement.worst
    assert whole.total == sum(vars(whole).values())


def test_ranks_of_a_shared_machine_share_its_memory():
    shared = replace(load_profile("H100"), shares_memory=True)
    asked = workload(profile=shared, nodes=2)
    assert serving_placement(asked, 4).available == shared.memory_bytes // 4
    assert serving_placement(asked, 16).available == shared.memory_bytes // 8  # eight on each of two nodes


def test_nodes_are_as_few_as_hold_the_ranks_evenly():
    asked = workload(nodes=4)
    assert [asked.nodes_of(t) for t in (1, 8, 12, 16, 32)] == [1, 1, 2, 2, 4]
    with pytest.raises(RequestError, match="--tp 11 cannot be dealt out evenly over 4 nodes of 8 ranks"):
        asked.nodes_of(11)
    with pytest.raises(ConfigError, match=r"degree 33 is outside 1..32"):
        asked.nodes_of(33)


def test_a_context_beyond_the_model_is_refused():
    with pytest.raises(CapacityError, match="--context 131073 is more than the 131072 tokens"):
        workload(context=131073)


def test_the_best_degrees_are_the_fastest_and_the_most_productive_of_those_that_fit():
    asked = workload(profile=replace(load_profile("H100"), memory_bytes=18_500_000_000))
    plans = [plan_serving(asked, t) for t in (1, 2, 4, 8)]
    assert not plans[0].placement.fits
    quick, busy = fastest(plans), most_productive(plans)
    assert quick is not None and busy is not None
    fitting = [plan for plan in plans if plan.placement.fits]
    assert quick.decode.seconds == min(plan.decode.seconds for plan in fitting)
    assert busy.throughput / busy.tp_size == max(plan.throughput / plan.tp_size for plan in fitting)
    assert fastest(plans[:1]) is None and most_productive(plans[:1]) is None


def test_speed_ups_are_relative_to_one_rank_even_where_it_does_not_fit():
    plan = plan_serving(workload(), 4)
    assert speed_up(workload(), plan) == pytest.approx(
        decode_time(workload(), 1).seconds / decode_time(workload(), 4).seconds
    )
    assert 1 < speed_up(workload(), plan) < 4


def test_training_keeps_less_where_the_stream_is_sharded_and_least_where_layers_are_computed_again():
    asked = workload(batch=2, context=2048)
    plan = plan_training(asked, 4)
    assert plan.sharded < plan.replicated
    again = training_placement(replace(asked, recomputed=True), 4).worst
    assert again.activations < plan.sharded
    assert plan.placement.worst.weights * 2 == plan.placement.worst.moments
    assert plan_training(replace(asked, recomputed=True), 4).step.products_s > plan.step.products_s


def test_profiles_that_are_none(tmp_path):
    with pytest.raises(RequestError, match="no hardware profile or file H1000: choose from a100-80g"):
        load_profile("H1000")
    (tmp_path / "whole.json").write_text(load_profile("H100").to_json())
    whole = json.loads((tmp_path / "whole.json").read_text())
    broken = tmp_path / "broken.json"
    for content in (whole | {"fabric": {"algorithms": ["carrier pigeon"]}}, whole | {"surplus": 1}, []):
        broken.write_text(json.dumps(content))
        with pytest.raises(RequestError, match="is not a hardware profile|not a JSON object"):
            load_profile(str(broken))
    nccl = {"generation": "ampere", "link": "nvlink", "channels": 1, "channel_gb_per_s": 20}
    none, nvls = nccl | {"channels": 0}, nccl | {"nvls_channels": 8, "nvls_channel_gb_per_s": 20}
    for change, message in (
        ({"fabric": {"nccl": none}}, "channels are 0"),
        ({"fabric": {"nccl": nvls}}, "generation ampere has no NVLS"),
        ({"rates": {"any": whole["rates"]["any"] | {"matrix_flops_per_s": {}}}}, "matrix_flops_per_s has no dtype"),
    ):
        broken.write_text(json.dumps(whole | change))
        with pytest.raises(RequestError, match=message):
            load_profile(str(broken))
    broken.write_text(json.dumps(whole | {"fabric": {"nccl": nccl}}))
    assert load_profile(str(broken)).fabric.nccl is not None
    lone = replace(load_profile("H100"), rates={4: load_profile("H100").rates[ANY_DEGREE]})
    with pytest.raises(RequestError, match="--tp 2: profile H100 was measured at degrees 4 only"):
        lone.rates_of(2)


def test_a_model_of_few_heads_is_planned_at_every_degree():
    config = ModelConfig.from_hf(hub_config("llama"))
    for tp_size in range(1, 9):
        plan = plan_serving(Workload(config, BFLOAT16, load_profile("L40S"), context=64), tp_size)
        assert plan.placement.fits and len(plan.placement.memory) == tp_size
    assert isinstance(load_profile("l40s"), Profile)


def test_where_queries_and_keys_are_normed_a_step_holds_them_once_more():
    """Of a narrow MLP, so that attention is the half of a layer that takes most."""
    config = replace(SEVEN_B, model_type="qwen3", intermediate_size=64)
    plain, normed = (
        serving_placement(workload(config=replace(config, qk_norm=qk_norm)), 1).worst.activations
        for qk_norm in (False, True)
    )
    assert normed - plain == 512 * (32 + 8) * 128 * 2
