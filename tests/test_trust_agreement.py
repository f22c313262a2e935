"""Ranks that disagree are told so by name, all of them in the same words, instead of hanging or computing junk."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from generation_models import tiny_config, tiny_model
from pool import RankPool
from tiny_models import write_checkpoint

from tp import choice
from tp.errors import CommunicationError
from tp.generation import GenerationOptions, SamplingParameters, score
from tp.generation.loading import load
from tp.inspection import capture
from tp.layers.layout import Replicate, ShardTokens
from tp.models import CausalLM, initialise_parameters, prepare_for_inference
from tp.parallel import TensorParallelGroup
from tp.parallel import group as group_module
from tp.parallel.agreement import check_alike, compare
from tp.parallel.announced_exchange import SHORT_BYTES
from tp.parallel.communicator import OrderedCommunicator
from tp.training.data import TrainingBatch
from tp.training.optimizer import adamw
from tp.training.schedule import CosineSchedule
from tp.training.train_step import Learner
from tp.training.trainer import Trainer, TrainingSchedule

ROOT = Path(__file__).parent.parent
LIMIT_S = 20.0
PROMPT = [3, 1, 4]
ENDING = ": start and call all of them alike"


def _told(action: Callable[[], Any]) -> str:
    with pytest.raises(CommunicationError) as caught:
        action()
    assert type(caught.value) is CommunicationError and caught.value.exit_code == 6
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _over_gloo(group: TensorParallelGroup) -> TensorParallelGroup:
    return TensorParallelGroup(OrderedCommunicator(group.process_group))


# --- what is compared, and how it is told ---


def test_the_first_difference_is_told_with_all_its_values() -> None:
    told = [{"a": "1", "b": "x"}, {"a": "1", "b": "y"}, {"a": "1", "b": "x", "c": "z"}]
    assert _told(lambda: compare((4, 5, 6), told)) == "the ranks differ in b, ranks 4, 6: x; rank 5: y" + ENDING


def test_who_says_nothing_goes_along() -> None:
    compare(range(4), [{"a": "1"}, {"a": None}, {}, {"a": "1", "b": "2"}])


def test_long_values_that_begin_alike_are_told_apart() -> None:
    values = ["x" * 60 + end for end in ("", "y", "z")]
    told = _told(lambda: compare(range(3), [{"a": value} for value in values]))
    digests = [f"{zlib.crc32(value.encode()):08x}" for value in values]
    shown = [values[0], *(f"{values[0]}… (digest {digest})" for digest in digests[1:])]
    assert told.endswith(", " + "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(shown)) + ENDING)


# --- versions ---


def _other_version(group: TensorParallelGroup, what: str) -> str:
    if group.rank == 1 and what == "tp-decoder":
        patched = mock.patch.object(group_module, "__version__", "0.0.9")
    else:
        patched = mock.patch.object(torch, "__version__", "2.9.1+cpu" if group.rank == 1 else "2.13.0+cu126")
    with patched:
        return _told(lambda: TensorParallelGroup.from_process_group(group.process_group))


@pytest.mark.parametrize("what, told", [("tp-decoder", "rank 1: 0.0.9"), ("torch", "rank 0: 2.13.0; rank 1: 2.9.1")])
def test_versions(ranks: RankPool, what: str, told: str) -> None:
    first, second = ranks(2).run(_other_version, what, timeout_s=LIMIT_S)
    assert first == second
    assert first.startswith(f"the ranks differ in {what}'s version, ") and first.endswith(told + ENDING)


def _builds_of_one_version(group: TensorParallelGroup) -> float:
    with mock.patch.object(torch, "__version__", "2.13.0+cpu" if group.rank else "2.13.0+cu126"):
        made = TensorParallelGroup.from_process_group(group.process_group)
    return made.communicator.all_reduce(torch.ones(1)).item()


def test_builds_of_one_version_agree(ranks: RankPool) -> None:
    assert ranks(2).run(_builds_of_one_version) == [2.0, 2.0]


# --- model files and dtypes ---

CHECKPOINTS: dict[str, tuple[dict[str, Any], str]] = {
    "values": ({"seed": 1}, "the values of lm_head.weight, ranks 0, 1: "),
    "theta": ({"rope_theta": 7000.0}, "config rope rope_theta, ranks 0, 1: 5000.0; rank 2: 7000.0"),
    "layers": ({"num_hidden_layers": 2}, "config num_layers, ranks 0, 1: 3; rank 2: 2"),
    "ends": ({"eos_token_id": 7}, "config eos_token_ids, ranks 0, 1: (); rank 2: (7,)"),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("checkpoints")
    made = {"first": str(write_checkpoint(root / "first"))}
    return made | {name: str(write_checkpoint(root / name, **options)) for name, (options, _) in CHECKPOINTS.items()}


def _load_others(group: TensorParallelGroup, paths: list[str], dtypes: list[str]) -> str:
    return _told(lambda: load(paths[group.rank], group, dtypes[group.rank]))


def _load_over_gloo(group: TensorParallelGroup, paths: list[str], dtypes: list[str]) -> str:
    return _load_others(_over_gloo(group), paths, dtypes)


@pytest.mark.parametrize("other", CHECKPOINTS)
@pytest.mark.parametrize("over", [_load_others, _load_over_gloo])
def test_model_files(ranks: RankPool, directories: dict[str, str], other: str, over: Any) -> None:
    paths = [directories["first"], directories["first"], directories[other]]
    told = ranks(3).run(over, paths, ["float32"] * 3, timeout_s=LIMIT_S)
    assert told == [told[0]] * 3
    assert told[0].startswith("the ranks differ in " + CHECKPOINTS[other][1])


def _one_element_in_the_middle(path: str, to: Path) -> str:
    """The same checkpoint with another value in one row of one tensor."""
    from safetensors.torch import load_file, save_file

    to.mkdir()
    for file in Path(path).iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(to / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    rows = len(tensors[name])
    tensors[name][(rows - 1) // 2, -1] += 1e-3
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return str(to)


def test_values_are_compared_in_every_tensor(ranks: RankPool, directories: dict[str, str], tmp_path: Path) -> None:
    paths = [directories["first"], _one_element_in_the_middle(directories["first"], tmp_path / "other")]
    for told in ranks(2).run(_load_others, paths, ["float32"] * 2, timeout_s=LIMIT_S):
        assert "differ in the values of model.layers.1.mlp.up_proj.weight, rank 0: " in told


def test_dtypes(ranks: RankPool, directories: dict[str, str]) -> None:
    told = ranks(2).run(_load_others, [directories["first"]] * 2, ["bfloat16", "float32"], timeout_s=LIMIT_S)
    assert told == [f"the ranks differ in dtype, rank 0: torch.bfloat16; rank 1: torch.float32{ENDING}"] * 2


# --- requests ---


def _of_rank(group: TensorParallelGroup, first: Any, second: Any) -> Any:
    return second if group.rank == 1 else first


def _tapped(model: Any) -> Any:
    with capture(model, ["resid_post"]):
        return model.generate([PROMPT])


def _switched_off(model: Any) -> Any:
    choice.disable("rms_norm")
    try:
        return model.generate([PROMPT])
    finally:
        choice.disable("")


def _as_int8(model: Any) -> Any:
    prepare_for_inference(tiny_model(TensorParallelGroup.alone()), "int8")  # of a model of its own: no collective
    model.lm_head.__dict__["weight"] = model.lm_head.weight.data
    return model.generate([PROMPT])


def _sharded(model: Any) -> Any:
    model.model.choose_layout = ShardTokens
    return model.generate([PROMPT])


def _replicated(model: Any) -> Any:
    model.model.choose_layout = Replicate
    return model.generate([PROMPT])


def _plain(model: Any) -> Any:
    return model.generate([PROMPT])


REQUESTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "prompt": (_plain, lambda m: m.generate([[3, 1, 5]]), "prompt 0, rank 0: [3, 1, 4]; rank 1: [3, 1, 5]"),
    "long prompt": (lambda m: m.generate([[1] * 50]), lambda m: m.generate([[1] * 49 + [2]]),
                    "prompt 0, rank 0: [1, 1, 1, 1, 1, 1, 1, 1,… (digest "),
    "number of prompts": (_plain, lambda m: m.generate([PROMPT] * 2), "the number of prompts, rank 0: 1; rank 1: 2"),
    "text": (_plain, lambda m: m.generate(["Hello"]), "prompt 0, rank 0: [3, 1, 4]; rank 1: 'Hello'"),
    "length": (_plain, lambda m: m.generate([PROMPT], GenerationOptions(9)),
               "option max_new_tokens, rank 0: 128; rank 1: 9"),
    "seed": (lambda m: m.generate([PROMPT], GenerationOptions(sampling=SamplingParameters(seed=4))),
             lambda m: m.generate([PROMPT], GenerationOptions(sampling=SamplingParameters(seed=5))),
             "option sampling seed, rank 0: 4; rank 1: 5"),
    "call": (_plain, lambda m: score(m, PROMPT), "call, rank 0: generate; rank 1: score"),
    "scored": (lambda m: score(m, PROMPT), lambda m: score(m, [3, 1]), "prompt 0, rank 0: [3, 1, 4]; rank 1: [3, 1]"),
    "layout": (_replicated, _sharded, "layout rule, rank 0: Replicate; rank 1: ShardTokens"),
    "tap": (_plain, _tapped, "tap, rank 0: none; rank 1: _Capture"),
    "operations": (_plain, _switched_off, "operations switched off, rank 0: none; rank 1: rms_norm"),
    "weights": (_plain, _as_int8, "weights, rank 0: Parameter; rank 1: Tensor"),
}  # fmt: skip


def _ask_otherwise(group: TensorParallelGroup, name: str) -> tuple[str, int]:
    first, second, _ = REQUESTS[name]
    model = tiny_model(group)
    told = _told(lambda: _of_rank(group, first, second)(model))
    return told, group.communicator.statistics.calls


def _ask_otherwise_over_gloo(group: TensorParallelGroup, name: str) -> tuple[str, int]:
    return _ask_otherwise(_over_gloo(group), name)


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("over", [_ask_otherwise, _ask_otherwise_over_gloo])
def test_requests_and_models(ranks: RankPool, name: str, over: Any) -> None:
    first, second = ranks(2).run(over, name, timeout_s=LIMIT_S)
    assert first == second
    assert first[0].startswith("the ranks differ in " + REQUESTS[name][2])
    assert first[0].endswith(ENDING)
    assert first[1] == 0  # the model has not run


def _another_config(group: TensorParallelGroup) -> str:
    model = tiny_model(group, {"intermediate_size": 48 + group.rank})
    return _told(lambda: model.generate([PROMPT]))


def test_configurations(ranks: RankPool) -> None:
    for told in ranks(2).run(_another_config, timeout_s=LIMIT_S):
        assert told == f"the ranks differ in config intermediate_size, rank 0: 48; rank 1: 49{ENDING}"


def _the_same_or_nothing(group: TensorParallelGroup) -> list[list[int]]:
    model = tiny_model(group)
    options = GenerationOptions(4)
    asked = [([PROMPT], options), ([tuple(PROMPT)], options), (None, None)]
    return [
        list(model.generate(*(asked[0] if group.rank == 0 else other)).sequences[0].new_ids) for other in asked
    ]  # fmt: skip


def test_the_same_or_nothing_is_no_difference(ranks: RankPool) -> None:
    of_rank = ranks(3).run(_the_same_or_nothing, timeout_s=LIMIT_S)
    assert of_rank == [of_rank[0]] * 3
    assert of_rank[0] == [of_rank[0][0]] * 3 and len(of_rank[0][0]) == 4


# --- training ---


def _batch(token: int, labels: int = 4, lengths: tuple[int, ...] = (3, 4)) -> TrainingBatch:
    ids = torch.arange(7)
    ids[5] = token
    return TrainingBatch(ids, torch.full((7,), labels), lengths)


BATCHES = {
    "token": ([_batch(5)], [_batch(6)], "the tokens of the micro-batches, "),
    "label": ([_batch(5)], [_batch(5, labels=3)], "the tokens of the micro-batches, "),
    "lengths": ([_batch(5)], [_batch(5, lengths=(4, 3))], "the tokens of the micro-batches, "),
    "number": ([_batch(5)], [_batch(5)] * 2, "the number of micro-batches, rank 0: 1; rank 1: 2"),
}


def _learner(group: TensorParallelGroup, **options: Any) -> Learner:
    model = CausalLM(tiny_config(), group)
    initialise_parameters(model, seed=0, std=0.1)
    return Learner(model, adamw(model, **({"learning_rate": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8,
                                           "weight_decay": 0.1} | options)))  # fmt: skip


def _trainer(learner: Learner, group: TensorParallelGroup, **options: Any) -> Trainer:
    given: dict[str, Any] = {
        "learning_rate": CosineSchedule(1e-3, 1e-4, 1, 4),
        "schedule": TrainingSchedule(4),
        "batches": lambda step: [_batch(5)],
        "evaluation": None,
        "save": lambda step: None,
    }
    return Trainer(learner, group, **given | options)


def _other_batches(group: TensorParallelGroup, name: str) -> tuple[str, list[int]]:
    first, second, _ = BATCHES[name]
    done: list[int] = []
    trainer = _trainer(
        _learner(group),
        group,
        batches=lambda step: second if group.rank == 1 and step == 2 else first,
        on_metrics=lambda metrics: done.append(metrics.step),
    )
    return _told(trainer.run), done


@pytest.mark.parametrize("name", BATCHES)
def test_micro_batches(ranks: RankPool, name: str) -> None:
    first, second = ranks(2).run(_other_batches, name, timeout_s=LIMIT_S)
    assert first == second
    told, done = first
    assert told.startswith("the ranks differ in " + BATCHES[name][2])
    assert done == [1, 2]


RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "steps": ({"schedule": TrainingSchedule(5)}, "schedule total_steps, rank 0: 4; rank 1: 5"),
    "saves": ({"schedule": TrainingSchedule(4, save_every=2)}, "schedule save_every, rank 0: 0; rank 1: 2"),
    "rate": ({"learning_rate": CosineSchedule(2e-3, 1e-4, 1, 4)}, "learning rate peak, rank 0: 0.001; rank 1: 0.002"),
    "dropout": ({"dropout_seed": 3}, "dropout seed, rank 0: 0; rank 1: 3"),
    "first step": ({"first_step": 2}, "first step, rank 0: 0; rank 1: 2"),
    "optimizer": ({"weight_decay": 0.2}, "optimizer, rank 0: "),
}


def _other_runs(group: TensorParallelGroup, name: str) -> str:
    changes = RUNS[name][0] if group.rank == 1 else {}
    decay = {key: value for key, value in changes.items() if key == "weight_decay"}
    of_trainer = {key: value for key, value in changes.items() if key not in ("weight_decay", "first_step")}
    trainer = _trainer(_learner(group, **decay), group, **of_trainer)
    return _told(lambda: trainer.run(changes.get("first_step", 0)))


@pytest.mark.parametrize("name", RUNS)
def test_training_runs(ranks: RankPool, name: str) -> None:
    first, second = ranks(2).run(_other_runs, name, timeout_s=LIMIT_S)
    assert first == second
    assert first.startswith("the ranks differ in " + RUNS[name][1])


# --- collectives over gloo; those through shared memory are in test_shared_memory ---

LONG = SHORT_BYTES // 4 + 1

COLLECTIVES = {
    "operation": (lambda c: c.all_reduce(torch.ones(3)), lambda c: c.broadcast(torch.ones(3)),
                  "ranks 0, 1: all_reduce of float32 [3]; rank 2: broadcast from rank 0 of float32 [3]"),
    "length": (lambda c: c.all_reduce(torch.ones(3)), lambda c: c.all_reduce(torch.ones(4)),
               "ranks 0, 1: all_reduce of float32 [3]; rank 2: all_reduce of float32 [4]"),
    "a short and a long one": (lambda c: c.all_reduce(torch.ones(3)),
                               lambda c: c.all_gather(torch.ones(LONG), [LONG] * 3),
                               f"ranks 0, 1: all_reduce of float32 [3]; rank 2: all_gather of float32 [{3 * LONG}]"),
    "two long ones": (lambda c: c.all_reduce(torch.ones(9 * LONG)), lambda c: c.all_reduce(torch.ones(8 * LONG)),
                      f"ranks 0, 1: all_reduce of float32 [{9 * LONG}]; rank 2: all_reduce of float32 [{8 * LONG}]"),
    "dtype": (lambda c: c.all_reduce(torch.ones(3)), lambda c: c.all_reduce(torch.ones(3, dtype=torch.int32)),
              "ranks 0, 1: all_reduce of float32 [3]; rank 2: all_reduce of int32 [3]"),
    "shape": (lambda c: c.all_reduce(torch.ones(3, 2)), lambda c: c.all_reduce(torch.ones(2, 3)),
              "ranks 0, 1: all_reduce of float32 [3, 2]; rank 2: all_reduce of float32 [2, 3]"),
    "sizes": (lambda c: c.reduce_scatter(torch.ones(3), [1, 1, 1]),
              lambda c: c.reduce_scatter(torch.ones(3), [0, 3, 0]),
              "ranks 0, 1: reduce_scatter of float32 [3], [1, 1, 1]; rank 2: reduce_scatter of float32 [3], [0, 3, 0]"),
    "source": (lambda c: c.broadcast(torch.ones(1), 1), lambda c: c.broadcast(torch.ones(1), 2),
               "ranks 0, 1: broadcast from rank 1 of float32 [1]; rank 2: broadcast from rank 2 of float32 [1]"),
    "nothing": (lambda c: c.all_reduce(torch.ones(0)), lambda c: c.all_reduce(torch.ones(1)),
                "ranks 0, 1: all_reduce of float32 [0]; rank 2: all_reduce of float32 [1]"),
    "object": (lambda c: c.all_gather(torch.ones(2), [2, 2, 2]), lambda c: c.all_gather_object("a" * 300),
               "ranks 0, 1: all_gather of float32 [6], [2, 2, 2]; rank 2: all_gather_object"),
}  # fmt: skip


def _different_collectives(group: TensorParallelGroup, name: str) -> tuple[str, float]:
    most, last, _ = COLLECTIVES[name]
    communicator = OrderedCommunicator(group.process_group)
    told = _told(lambda: (last if group.rank == 2 else most)(communicator))
    return told, communicator.all_reduce(torch.ones(1)).item()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_different_collectives_over_gloo(ranks: RankPool, name: str) -> None:
    """On every rank at once, none aborted by gloo, and in step again."""
    outcomes = ranks(3).run(_different_collectives, name, timeout_s=LIMIT_S)
    assert outcomes == [(outcomes[0][0], 3.0)] * 3
    assert COLLECTIVES[name][2] in outcomes[0][0]
    assert outcomes[0][0].endswith(": call the same ones, in the same order, on all ranks")


def _alike_as_far_as_shown(group: TensorParallelGroup) -> str:
    shape = [1] * 30 + [2, 1] if group.rank else [1] * 31 + [2]
    return _told(lambda: OrderedCommunicator(group.process_group).all_reduce(torch.ones(shape)))


def test_what_a_header_has_no_room_for_is_compared(ranks: RankPool) -> None:
    for told in ranks(2).run(_alike_as_far_as_shown, timeout_s=LIMIT_S):
        assert told.startswith("the ranks are in all_reduce of float32 [1, 1, 1, ")
        assert told.endswith(", but with other shapes or sizes: give all of them the same")


def _in_another_order(group: TensorParallelGroup) -> str:
    communicator = OrderedCommunicator(group.process_group)
    calls = [
        lambda: communicator.all_reduce(torch.ones(2, 4)),
        lambda: communicator.reduce_scatter(torch.ones(8), [4, 4]),
    ]
    return _told(lambda: [call() for call in (calls if group.rank else calls[::-1])])


def test_an_order_of_collectives_over_gloo(ranks: RankPool) -> None:
    first, second = ranks(2).run(_in_another_order, timeout_s=LIMIT_S)
    assert first == second
    assert "rank 0: reduce_scatter of float32 [8], [4, 4]; rank 1: all_reduce of float32 [2, 4]" in first


def _in_a_part_of_the_run(group: TensorParallelGroup) -> list[str]:
    part = dist.new_group([1, 2])  # the pool's whole world takes part
    if group.rank not in (1, 2):
        return []
    communicator = OrderedCommunicator(part)
    collective = communicator.all_reduce if group.rank == 1 else communicator.broadcast
    return [
        _told(lambda: collective(torch.ones(1))),
        _told(lambda: check_alike(communicator, {"a": f"of {group.rank}"})),
    ]


def test_ranks_are_told_by_their_numbers_in_the_run(ranks: RankPool) -> None:
    _, first, second, _ = ranks(4).run(_in_a_part_of_the_run, timeout_s=LIMIT_S)
    assert first == second
    assert "rank 1: all_reduce of float32 [1]; rank 2: broadcast from" in first[0]
    assert "rank 1: of 1; rank 2: of 2" in first[1]


def _copies_to_the_host(group: TensorParallelGroup) -> int:
    with mock.patch.object(torch.Tensor, "cpu", side_effect=lambda: torch.zeros(1, 2)) as copied:
        _over_gloo(group).communicator.all_reduce(torch.ones(2))
    return copied.call_count


def test_a_tensor_for_all_ranks_is_copied_to_the_host_once(ranks: RankPool) -> None:
    assert ranks(3).run(_copies_to_the_host) == [1, 1, 1]


# --- through the launcher ---

SCRIPT = """
import sys
from tp import TensorParallelGroup, load
group = TensorParallelGroup.from_environment(device="cpu")
load(sys.argv[1 + group.rank], group, "float32")
"""


@pytest.mark.long
@pytest.mark.parametrize("disabled", ["", "shared_memory"])
def test_ranks_that_disagree_end_the_run_with_status_6(
    directories: dict[str, str], tmp_path: Path, disabled: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    paths = [directories["first"], directories["theta"]]
    command = [sys.executable, "-m", "launch", "run", "--nproc-per-node", "2", str(tmp_path / "script.py"), *paths]
    environment = {**os.environ, choice.DISABLE_VARIABLE: disabled, "PYTHONPATH": str(ROOT)}
    began = time.monotonic()
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment)
    assert run.returncode == 6, run.stderr
    assert run.stderr == (
        f"error: the ranks differ in config rope rope_theta, rank 0: 5000.0; rank 1: 7000.0{ENDING}\n"
    )
    assert time.monotonic() - began < 60
