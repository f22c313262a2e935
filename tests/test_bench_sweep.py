"""What a sweep of `bench` measures, and what it refuses: no process is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import hub_config

from launch.__main__ import build_parser
from launch.benching import amounts, options
from launch.benching.engines import Stage, contestants, request_of, stages
from launch.benching.measure import turns_of
from launch.benching.subject import Subject
from launch.benching.sweep import Case, Form, growth, scaling_forms, work_of
from launch.measurement.engine.requests import TrainingRequest, request_of_line
from launch.measurement.model_facts import config_of, text_of_config
from launch.measurement.requests import DecodeRequest, random_request
from tp.config import ModelConfig
from tp.errors import ConfigError, RequestError, TensorParallelError
from tp.training.flops import training_flops_per_token


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(hub_config("llama")))
    return path


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.setattr(options, "own_cores", lambda: range(4))


def parsed(*argv):
    arguments = build_parser().parse_args(["bench", "--device", "cpu", *map(str, argv)])
    arguments.argv = list(argv)
    return arguments


def sweep(*argv, family="llama"):
    return options.sweep_of(
        parsed("--threads", 4, *argv), ModelConfig.from_hf(hub_config(family, max_position_embeddings=1000))
    )


def refusal(*argv):
    """The whole way of the command up to where the first process would start."""
    arguments = parsed(*argv)

    def begin():
        options.check(arguments)
        options.sweep_of(arguments, Subject.of_config(arguments.config).config)

    with pytest.raises(TensorParallelError) as caught:
        begin()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_axis_is_combined_with_every_other():
    found = sweep(
        "--tp", "2,4", "--batch", "8,1", "--prompt-tokens", "16,32", "--new-tokens", "4,2", "--row-tokens", "64",
        "--dtype", "float32,bfloat16", "--scaling", "strong,weak-batch",
    )  # fmt: skip
    cases = found.cases()
    assert len(cases) == len(set(cases)) == 2 * 2 * 2 * (2 + 2 * 2 + 1)
    assert cases[0] == Case("strong", "prefill", "float32", 1, 16, 1)
    assert {case.new_tokens for case in cases if case.phase == "train"} == {0}
    assert {case.tokens for case in cases if case.phase == "train"} == {64}
    assert [str(stage) for stage, _ in stages(cases)] == [
        "serving in float32", "serving in bfloat16", "training in float32", "training in bfloat16",
    ]  # fmt: skip


def test_t_1_takes_part_whether_or_not_it_is_named():
    assert [form.name for form in sweep("--tp", "4").forms] == ["own tp=1", "own tp=4 replicate", "own tp=4 sharded"]
    assert [form.name for form in sweep("--tp", "1", "--layouts", "sharded").forms] == ["own tp=1"]
    assert [form.tp_size for form in sweep().forms] == [1, 2, 2, 4, 4]
    assert [form.tp_size for form in sweep("--threads", "3").forms] == [1]


def test_every_degree_has_the_same_threads_and_no_more_than_there_are_cores():
    found = sweep("--tp", "1,2,4", "--compare", "vllm,llama_cpp")
    shapes = {(form.system, form.tp_size): form.threads for form in (*found.forms, *found.peers)}
    assert shapes == {
        ("own", 1): 4, ("own", 2): 2, ("own", 4): 1,
        ("vllm", 1): 4, ("vllm", 2): 2, ("vllm", 4): 1, ("llama_cpp", 1): 4,
    }  # fmt: skip
    assert all(form.tp_size * form.threads == form.units == 4 for form in (*found.forms, *found.peers))


def test_on_gpus_a_rank_is_a_gpu_and_threads_are_alike():
    forms = scaling_forms([4, 2], ["sharded"], 16, on_gpus=True)
    assert [(form.tp_size, form.threads, form.units) for form in forms] == [(1, 4, 1), (2, 4, 2), (4, 4, 4)]


@pytest.mark.parametrize(
    "scaling, work, times", [("strong", (3, 10), 1), ("weak-batch", (12, 10), 4), ("weak-tokens", (3, 40), 4)]
)
def test_work_grows_with_t_in_weak_scaling(scaling, work, times):
    case, form = Case(scaling, "prefill", "float32", 3, 10, 1), Form("own", 4, 1, 4, "sharded")
    assert work_of(case, form) == work and growth(case, form) == times
    assert work_of(case, Form("own", 1, 4, 4)) == (3, 10)


def test_the_largest_work_of_any_form_is_what_contestants_are_told_of(config_file):
    found = sweep("--tp", "2", "--batch", "1,3", "--prompt-tokens", "8,20", "--new-tokens", "5", "--row-tokens", "50",
                  "--scaling", "weak-batch,weak-tokens")  # fmt: skip
    assert found.largest() == (6, 45)
    assert found.longest_row() == 100
    subject = Subject.of_config(config_file)
    settings = parsed()
    settings.gguf, settings.backend = None, "auto"
    made = contestants(found.forms, Stage("float32", False), found, subject, settings)
    assert [contestant.name for contestant in made] == ["own tp=1", "own tp=2"]
    command = made[1].command()
    arguments = " ".join(command.arguments)
    assert "--nproc 2" in arguments and "--most-sequences 6 --most-tokens 45 --processes 2 --threads 2" in arguments
    assert command.environment["OMP_NUM_THREADS"] == "2"


def test_a_configuration_goes_to_the_ranks_as_it_was_understood(config_file):
    for family in ("llama", "mistral"):
        config = ModelConfig.from_hf(hub_config(family))
        assert config_of(text_of_config(config)) == config
    subject = Subject.of_config(config_file)
    assert config_of(subject.source) == subject.config and subject.name.endswith("/config.json")


def test_layouts_of_one_degree_are_asked_for_the_same_prompts():
    case = Case("weak-batch", "decode", "float32", 1, 8, 3)
    one, sharded = (request_of(case, Form("own", 2, 1, 2, layout), 50) for layout in ("replicate", "sharded"))
    assert (one.layout, sharded.layout) == ("off", "on")
    assert one.prompt_ids == sharded.prompt_ids == random_request(2, 8, 3, 50).prompt_ids
    for request in (one, request_of(Case("strong", "train", "float32", 2, 8, 0), Form("own", 1, 2, 2), 50)):
        assert request_of_line(request.line()) == request
    assert request_of_line(TrainingRequest(2, 8, "on").line()) == TrainingRequest(2, 8, "on")
    assert isinstance(request_of_line('{"prompt_ids": [[1]], "new_tokens": 2}'), DecodeRequest)


def test_measurements_are_counted_before_they_are_made():
    found = sweep("--tp", "2", "--phases", "decode,train", "--compare", "llama_cpp")
    decode, train = found.cases()
    assert turns_of(found, [decode], rounds=6) == 6 * (3 + 1 + 2)
    assert turns_of(found, [train], rounds=6) == 6 * (3 + 2)


def test_a_decode_step_reads_the_weights_and_the_cache_as_it_is_on_average():
    config = ModelConfig.from_hf(hub_config("llama"))
    case, form = Case("strong", "decode", "bfloat16", 3, 10, 4), Form("own", 1, 1, 1)
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
    contexts = [11, 12, 13]
    expected = 1000 + 3 * per_token * sum(contexts) / len(contexts)
    assert amounts.amount_of(case, form, config, step_bytes=1000) == pytest.approx(expected)
    twice = amounts.amount_of(Case("weak-batch", "decode", "bfloat16", 3, 10, 4), Form("own", 2, 1, 2), config, 1000)
    assert twice - 1000 == pytest.approx(2 * (expected - 1000))


def test_a_prefill_computes_a_third_of_a_training_step_without_the_ends_of_all_but_the_last_tokens():
    config = ModelConfig.from_hf(hub_config("llama"))
    train, prefill = (
        amounts.amount_of(Case("strong", phase, "float32", 2, 100, new_tokens), Form("own", 1, 1, 1), config, 0)
        for phase, new_tokens in (("train", 0), ("prefill", 1))
    )
    assert train == 200 * training_flops_per_token(config, 100)
    heads = config.num_attention_heads * config.head_dim
    ends = 2 * 198 * config.hidden_size * (config.vocab_size + heads + 3 * config.intermediate_size)  # head, last layer
    own_token = 4 * config.num_layers * config.num_attention_heads * config.head_dim * 100  # half of it, exactly
    assert prefill + ends == pytest.approx(train / 3 + own_token)


def test_dtypes_are_those_of_the_commands_where_none_is_asked_for():
    assert [case.dtype for case in sweep("--phases", "decode,train").cases()] == ["bfloat16", "float32"]
    assert [c.dtype for c in sweep("--phases", "decode,train", "--dtype", "bfloat16").cases()] == ["bfloat16"] * 2


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--threads", 8], "--threads 8 is more than the 4 cores here"),
        (["--tp", "1,6"], "--tp 6 needs a thread for each rank: --threads is 4"),
        (["--tp", "3"], "--tp 3 cannot have the 4 threads of t = 1"),
        (["--tp", "10", "--threads", "4"], "tensor-parallel degree 10 is outside 1..9"),
        (["--new-tokens", "1"], "--new-tokens 1 leaves no time between tokens"),
        (["--prompt-tokens", "100", "--new-tokens", "29"], "a sequence would come to 129 tokens, the model takes 128"),
        (["--prompt-tokens", "60", "--scaling", "weak-tokens", "--tp", "2", "--row-tokens", "65"],
         "a sequence would come to 152 tokens"),
        (["--row-tokens", "129", "--prompt-tokens", "8"], "a row would have 129 tokens"),
        (["--dtype", "float16"], "--dtype float16 cannot be trained in"),
        (["--resume"], "--resume needs --json FILE"),
        (["--compare", "vllm"], "--compare needs --model"),
        (["--gguf", "m.gguf"], "--gguf is what llama_cpp loads: it goes with --compare llama_cpp"),
        (["--markdown", "/nowhere/x.md"], "there is no directory /nowhere"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_in_one_line(config_file, argv, message):
    assert message in refusal("--config", config_file, *argv)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--layouts", "ring"], "'ring' is not one of replicate, sharded"),
        (["--phases", ","], "it is empty"),
        (["--compare", "llamafile"], "'llamafile' is not one of transformers, vllm, llama_cpp"),
        (["--tp", "0"], "'0' is not an integer of at least 1"),
        (["--warm-ups", "0"], "'0' is not an integer of at least 1 .see"),
        (["--patience", "0"], "'0' is not a number of seconds above 0"),
        (["--patience", "nan"], "'nan' is not a number of seconds above 0"),
    ],
)
def test_names_that_there_are_not_are_refused_by_the_parser(argv, message):
    with pytest.raises(RequestError, match=message):
        parsed("--config", "x.json", *argv)


def test_one_model_is_needed(config_file):
    both = ["--model", str(Path(__file__).parent), "--config", config_file]
    for argv in ([], both):
        with pytest.raises(RequestError, match="takes one of --model"):
            options.check(parsed(*argv))
    with pytest.raises(ConfigError, match="degree 10"):
        options.check(parsed("--config", config_file, "--tp", "10"))


def test_it_does_not_run_under_a_launcher(monkeypatch, config_file):
    from launch import bench

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RequestError, match="run it without torchrun"):
        bench.execute(parsed("--config", config_file))
