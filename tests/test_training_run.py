"""Runs that are stopped, killed and resumed, at any degree, go on as if nothing had happened."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from training_runs import CONFIG, LENGTH, STEPS, documents, train

from tp.errors import CheckpointError, RequestError
from tp.layers.layout import Replicate, ShardTokens
from tp.models import CausalLM
from tp.parallel import TensorParallelGroup
from tp.training.data import EvaluationBatches
from tp.training.groups import TrainingGroups
from tp.training.metrics import MetricsLog, bits_per_byte, plot_metrics, read_metrics
from tp.training.optimizer import adamw
from tp.training.store import CheckpointStore, read_run

HALF = STEPS // 2


def _train(group, directory, **options):
    return train(group, Path(directory), **options)


@pytest.fixture(scope="module")
def uninterrupted(ranks, tmp_path_factory):
    """Losses at t = 2 in float64."""
    found = ranks(2).run(_train, str(tmp_path_factory.mktemp("whole")), evaluate_every=HALF)
    assert found[0]["losses"] == found[1]["losses"] and found[0]["done"] == STEPS
    losses = found[0]["losses"]
    assert losses[STEPS] < losses[1] - 0.1
    return found[0]


@pytest.fixture(scope="module")
def stopped(ranks, tmp_path_factory):
    """A run that was asked to stop half-way at t = 2."""
    directory = tmp_path_factory.mktemp("stopped")
    found = ranks(2).run(_train, str(directory), stop_after=HALF, evaluate_every=HALF)
    assert found[0]["done"] == HALF and found[0]["evaluations"] == {}  # stopping comes first
    assert CheckpointStore(directory).steps() == [HALF]
    return directory


def resume(ranks, t, stopped, tmp_path, **options):
    directory = tmp_path / "run"
    shutil.copytree(stopped, directory)
    return ranks(t).run(_train, str(directory), **options)[0]


def test_resumed_at_the_same_degree_the_losses_are_the_same_bits(ranks, uninterrupted, stopped, tmp_path):
    went_on = resume(ranks, 2, stopped, tmp_path)
    assert went_on["losses"] == {s: uninterrupted["losses"][s] for s in range(HALF + 1, STEPS + 1)}
    assert went_on["evaluations"][STEPS] == uninterrupted["evaluations"][STEPS]


@pytest.mark.parametrize(
    "t, options",
    [(3, {}), (1, {"layout": Replicate}), (3, {"layout": Replicate, "micro_batch": 1}), (4, {"replicas": 2})],
)
def test_resumed_at_another_degree_and_layout_it_goes_on(ranks, uninterrupted, stopped, tmp_path, t, options):
    went_on = resume(ranks, t, stopped, tmp_path, **options)
    assert list(went_on["losses"]) == list(range(HALF + 1, STEPS + 1))
    for step, loss in went_on["losses"].items():
        assert loss == pytest.approx(uninterrupted["losses"][step], abs=1e-9)
    assert went_on["evaluations"][STEPS] == pytest.approx(uninterrupted["evaluations"][STEPS], abs=1e-9)


def test_bfloat16_resumes_in_the_same_bits(ranks, tmp_path):
    options = {"dtype": torch.float32, "compute": torch.bfloat16, "layout": ShardTokens}
    whole = ranks(2).run(_train, str(tmp_path / "whole"), **options)[0]
    ranks(2).run(_train, str(tmp_path / "parts"), stop_after=3, **options)
    went_on = ranks(2).run(_train, str(tmp_path / "parts"), **options)[0]
    assert went_on["losses"] == {s: whole["losses"][s] for s in range(4, STEPS + 1)}


def test_two_replicas_of_two_ranks_are_one_process(ranks, uninterrupted, tmp_path):
    found = ranks(4).run(_train, str(tmp_path / "run"), replicas=2, micro_batch=1, evaluate_every=HALF, save_every=3)
    for outcome in found:
        assert outcome["losses"] == pytest.approx(uninterrupted["losses"], abs=1e-9)
        assert outcome["evaluations"] == pytest.approx(uninterrupted["evaluations"], abs=1e-9)
    assert CheckpointStore(tmp_path / "run").steps() == [3, 6, STEPS]


def test_transformers_opens_a_checkpoint_and_finds_the_same_loss(tmp_path):
    from transformers import AutoModelForCausalLM

    found = train(TensorParallelGroup.alone(), tmp_path, dtype=torch.float32)
    path = CheckpointStore(tmp_path).path_of(STEPS)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).double().eval()
    total = count = 0
    for batch in EvaluationBatches(documents(9, 7), LENGTH, 1):
        with torch.no_grad():
            logits = theirs(batch.token_ids[None]).logits[0]
        total += torch.nn.functional.cross_entropy(logits, batch.labels, reduction="sum").item()
        count += len(batch.labels)
    assert total / count == pytest.approx(found["evaluations"][STEPS], abs=1e-6)
    assert read_run(path) == {"about": "a test", "step": STEPS}


def test_keep_drops_the_oldest(tmp_path):
    train(TensorParallelGroup.alone(), tmp_path, save_every=2, keep=2)
    assert CheckpointStore(tmp_path).steps() == [6, STEPS]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000008"]


def test_a_damaged_checkpoint_is_an_error_that_names_it(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    store = CheckpointStore(tmp_path)
    optimizer_file = store.path_of(HALF) / "training" / "optimizer.safetensors"
    optimizer_file.write_bytes(optimizer_file.read_bytes()[:-100])
    model = CausalLM(CONFIG)
    optimizer = adamw(model, learning_rate=1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    with pytest.raises(CheckpointError, match="optimizer.safetensors"):
        store.load(HALF, model, optimizer)


def _save_until_killed(directory, last, about_to_save):
    torch.set_num_threads(1)  # as the process that it is compared with

    def tell(step):
        about_to_save.send(step)
        if step > last:
            time.sleep(600)

    train(TensorParallelGroup.alone(), Path(directory), save_every=1, keep=2, before_save=tell)


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.long)])
def test_killed_during_a_save_it_resumes_from_a_whole_checkpoint(kills, tmp_path):
    whole = train(TensorParallelGroup.alone(), tmp_path / "whole", save_every=1)["losses"]
    moments = random.Random(kills)
    partial = 0
    for kill in range(kills):
        directory = tmp_path / str(kill)
        kill_in_save(directory, moments.randint(2, STEPS - 1), moments.random())
        store = CheckpointStore(directory)
        partial += bool(list(directory.glob(".step-*")))
        store.clear_leftovers()
        assert {path.name[:5] for path in directory.iterdir()} == {"step-"}
        newest = store.steps()[-1]
        went_on = train(TensorParallelGroup.alone(), directory)
        assert went_on["losses"] == {step: whole[step] for step in range(newest + 1, STEPS + 1)}
    assert partial >= kills // 2  # most of the kills met a save at work


def kill_in_save(directory, step, fraction):
    """SIGKILL while the run saves its checkpoint of `step`, some fraction of a save's time after it began."""
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_save_until_killed, args=(str(directory), step, there))
    process.start()
    there.close()
    began = time.monotonic()
    while here.recv() < step:
        duration, began = time.monotonic() - began, time.monotonic()  # of a step and a save
    while not list(directory.glob(".step-*")) and time.monotonic() < began + 10:
        time.sleep(1e-4)  # until there is something of the new checkpoint
    time.sleep(fraction * duration / 10)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def _fail_on_first_replica(group):
    """An error of the replica that saves reaches the ranks that wait for it."""
    groups = TrainingGroups.of(group, 2)

    def action():
        groups.tensor.communicator.all_reduce(torch.ones(1))
        raise CheckpointError(f"replica {groups.data.rank} has no room")

    groups.on_first_replica(action)


def test_replicas_share_the_errors_of_the_one_that_saves(ranks):
    with pytest.raises(CheckpointError, match="replica 0 has no room"):
        ranks(4).run(_fail_on_first_replica)
    with pytest.raises(RequestError, match="1 ranks cannot be divided into 2"):
        TrainingGroups.of(TensorParallelGroup.alone(), 2)


def test_the_metrics_of_steps_that_are_done_again_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(1, 6):
        log.append({"kind": "step", "step": step, "loss": 6.0 - step, "learning_rate": 1e-3})
    log.append({"kind": "evaluation", "step": 5, "loss": 1.0, "perplexity": 2.7, "bits_per_byte": 0.5})
    log.close()
    with path.open("a") as file:
        file.write('{"kind": "step", "ste')  # as a crash leaves it
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4, 5, 5]
    log = MetricsLog(path, steps_done=3)
    log.append({"kind": "step", "step": 4, "loss": 2.5, "learning_rate": 1e-3})
    log.close()
    assert [(record["step"], record["loss"]) for record in read_metrics(path)] == [(1, 5), (2, 4), (3, 3), (4, 2.5)]
    assert [item.name for item in tmp_path.iterdir()] == ["metrics.jsonl"]
    with pytest.raises(CheckpointError, match="cannot be written"):
        MetricsLog(tmp_path / "absent" / "metrics.jsonl")


def test_the_plot_is_a_picture(tmp_path):
    steps = [{"kind": "step", "step": s, "loss": 9 / s, "learning_rate": 1e-3 / s} for s in range(1, 9)]
    evaluation = {"kind": "evaluation", "step": 8, "loss": 1.2, "perplexity": 3.3, "bits_per_byte": 0.9}
    for count, records in enumerate([steps[:1], steps, [*steps, evaluation], [evaluation]]):
        plot_metrics(records, tmp_path / f"{count}.png")
        assert (tmp_path / f"{count}.png").read_bytes().startswith(b"\x89PNG")


def test_bits_per_byte():
    assert bits_per_byte(loss=torch.log(torch.tensor(4.0)).item(), num_labels=30, num_bytes=120) == pytest.approx(0.5)
