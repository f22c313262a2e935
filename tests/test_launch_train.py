"""`train` and `convert` on the command line: what they refuse, what SIGTERM does, and what they leave behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from checkpoint_samples import make_config, make_tensors, write_directory, write_gguf
from safetensors.torch import load_file
from test_launch_commands import LAUNCH, TORCHRUN, finish, start

from launch.__main__ import main
from launch.stop_request import SAME_REQUEST_S, StopRequest
from launch.training_recipe import Recipe
from tp.training.metrics import read_metrics

CONFIG = {
    "model_type": "llama",
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
SMALL = ["--device", "cpu", "--sequence-length", "16", "--batch-size", "4"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json, text.txt of twelve documents, other.txt, chat.jsonl."""
    directory = tmp_path_factory.mktemp("inputs")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    texts = [f"the {n} quick foxes jump over {n * n} lazy dogs. " * 4 for n in range(12)]
    (directory / "text.txt").write_text("\n<|document|>\n".join(texts))
    (directory / "other.txt").write_text("\n<|document|>\n".join(texts[::-1]))
    pairs = [{"prompt": f"{n} and 1?", "completion": f" {n + 1}"} for n in range(30)]
    (directory / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return directory


def train_options(inputs: Path, output: Path, *options: str) -> list[str]:
    data = ["--data", str(inputs / "text.txt"), "--data-cache", str(inputs / "cache")]
    model = ["--config", str(inputs / "config.json"), "--train-tokenizer", "300"]
    return ["train", *data, *model, *SMALL, "--output", str(output), *options]


def refusal(capfd: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The line with which a command is refused, by this process: no rank has started."""
    assert main(arguments) in (2, 3, 4)
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    "options, message",
    [
        (["--model", "X"], "--model and --config contradict"),
        (["--tokenizer", "/"], "one of --tokenizer DIR and --train-tokenizer V"),
        (["--batch-size", "5", "--dp", "2"], "--batch-size 5 is not a multiple of --dp 2"),
        (["--micro-batch-size", "3", "--dp", "2"], "leaves 2 rows a replica: no multiple of --micro-batch-size 3"),
        (["--tp", "5"], "degree 5 is outside 1..4"),
        (["--eval-fraction", "1.5"], "must lie between 0 and 1"),
        (["--evaluate-every", "5"], "--evaluate-every needs --eval-data or --eval-fraction"),
        (["--warmup-steps", "2000"], "2000 warm-up steps are outside 0..1000"),
        (["--final-learning-rate", "1"], "final learning rate 1.0 is outside"),
        (["--beta2", "1"], "--beta2 1.0 is outside 0..1"),
        (["--weight-decay", "-1"], "--weight-decay -1.0 is negative"),
        (["--grace", "0"], "argument --grace: '0' is not a number of seconds"),
        (["--grace", "nan"], "argument --grace: 'nan' is not a number of seconds"),
        (["--grace", "inf"], "argument --grace: 'inf' is not a number of seconds"),
        (["--data", "/absent.txt"], "/absent.txt is not a file"),
        (["--dtype", "float16"], "invalid choice: 'float16'"),
    ],
)
def test_what_is_refused_before_ranks_start(
    options: list[str], message: str, inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    assert message in refusal(capfd, train_options(inputs, output, *options))
    assert not output.exists()


def test_combinations_with_files_that_are_refused(
    inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "something").touch()
    assert "is not empty: --resume goes on" in refusal(capfd, train_options(inputs, tmp_path))
    both = ["--eval-data", str(inputs / "other.txt"), "--eval-fraction", "0.1"]
    assert "contradict each other" in refusal(capfd, train_options(inputs, tmp_path / "run", *both))
    picture = inputs / "picture.png"
    picture.touch()
    assert "not a kind of file that training reads" in refusal(
        capfd, train_options(inputs, tmp_path / "run", "--data", str(picture))
    )
    bare = ["train", "--data", str(inputs / "text.txt"), "--output", str(tmp_path / "run")]
    assert "--model (to fine-tune) or --config (to begin from nothing) is missing" in refusal(capfd, bare)
    assert "go with --config" in refusal(capfd, [*bare, "--model", str(inputs), "--train-tokenizer", "300"])
    empty = ["--config", str(inputs / "config.json"), "--tokenizer", ""]
    assert "--tokenizer  is not a directory" in refusal(capfd, [*bare, *empty])


def test_an_output_that_cannot_be_made_is_refused_before_anything_is_loaded(
    inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*given: object) -> None:
        raise AssertionError("something was loaded")

    monkeypatch.setattr("launch.training_run.find_start", load)
    (tmp_path / "file").touch()
    for output, reason in (
        (tmp_path / "file" / "run", "Not a directory"),
        (Path("/proc/run"), "No such file or directory"),
    ):
        said = refusal(capfd, train_options(inputs, output, "--tp", "1"))
        assert said == f"error: --output {output} cannot be made: {reason}\n"


def test_a_recipe_is_inherited_and_may_not_change() -> None:
    from argparse import Namespace
    from dataclasses import asdict, fields

    nothing = {field.name: None for field in fields(Recipe)}
    recipe = Recipe.of(Namespace(**nothing | {"steps": 50, "learning_rate": 1e-2}))
    assert (recipe.final_learning_rate, recipe.warmup_steps, recipe.batch_size) == (1e-3, 5, Recipe.batch_size)
    saved = json.loads(json.dumps(recipe.to_json()))
    assert Recipe.of(Namespace(**nothing), saved) == Recipe.of(Namespace(**asdict(recipe)), saved) == recipe
    for name, value in asdict(recipe).items():
        other = Namespace(**nothing | {name: 0.5 if value is None else True if value is False else value + 1})
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} .* differs from the .* of the run to resume"):
            Recipe.of(other, saved)


def wait_for_steps(output: Path, count: int, run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while len(read_metrics(output / "metrics.jsonl")) < count:
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def test_sigterm_saves_and_resume_goes_on_to_the_end(inputs: Path, tmp_path: Path) -> None:
    """On two ranks that we start, then alone. The first run has more steps before it than it will reach."""
    output = tmp_path / "run"
    options = ["--eval-fraction", "0.2", "--evaluate-every", "1000", "--json"]
    run = start([*LAUNCH, *train_options(inputs, output, *options, "--steps", "4000", "--tp", "2")])
    wait_for_steps(output, 5, run)
    run.send_signal(signal.SIGTERM)
    status, out, err = finish(run)
    assert status == 0, err
    summary = json.loads(out)
    done = summary["steps"]
    assert 5 <= done < 4000 and not summary["complete"] and summary["tokens_per_s"] > 0
    assert summary["checkpoint"] == str(output / f"step-{done:08d}")
    assert [record["step"] for record in read_metrics(output / "metrics.jsonl")] == list(range(1, done + 1))
    assert sorted(path.name for path in output.iterdir()) == ["loss.png", "metrics.jsonl", f"step-{done:08d}"]

    run_json = output / f"step-{done:08d}" / "training" / "run.json"
    content = json.loads(run_json.read_text())
    content["recipe"] |= {"steps": done + 3, "warmup_steps": 1}  # a shorter way to the end
    run_json.write_text(json.dumps(content))
    (output / ".step-00009999.partial-1").mkdir()
    data = ["--data", str(inputs / "text.txt"), "--data-cache", str(inputs / "cache")]
    assert main(["train", *data, "--device", "cpu", "--tp", "1", "--output", str(output), "--resume"]) == 0
    records = read_metrics(output / "metrics.jsonl")
    assert [record["step"] for record in records] == [*range(1, done + 4), done + 3]
    assert records[-1]["kind"] == "evaluation" and 0 < records[-1]["bits_per_byte"] < records[-1]["perplexity"]
    assert (output / f"step-{done + 3:08d}" / "tokenizer.json").is_file()
    assert not list(output.glob(".*")) and (output / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_checkpoint_is_fine_tuned_in_process(inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """From nothing, then from what that made, on prompts and completions; then other data is refused."""
    first, second = tmp_path / "first", tmp_path / "second"
    options = ["--steps", "3", "--tp", "1", "--dtype", "bfloat16", "--activation-checkpointing", "--json"]
    assert main(train_options(inputs, first, *options, "--keep", "1", "--save-every", "1", "--log-every", "2")) == 0
    assert json.loads(capfd.readouterr().out)["checkpoint"] == str(first / "step-00000003")
    assert [path.name for path in first.glob("step-*")] == ["step-00000003"]
    assert [record["step"] for record in read_metrics(first / "metrics.jsonl")] == [2]
    assert load_file(first / "step-00000003" / "model.safetensors")["model.norm.weight"].dtype == torch.float32

    tune = ["train", "--model", str(first / "step-00000003"), "--data", str(inputs / "pairs.jsonl"), *SMALL]
    tune += ["--data-cache", str(tmp_path / "cache"), "--output", str(second), "--tp", "1"]
    assert main([*tune, "--steps", "2", "--isolate-documents", "--micro-batch-size", "1"]) == 0
    assert (second / "step-00000002").is_dir()
    capfd.readouterr()
    tune[tune.index(str(inputs / "pairs.jsonl"))] = str(inputs / "other.txt")
    assert "is not what the run to resume was trained on" in refusal(capfd, [*tune, "--resume"])


def test_the_layout_and_checkpointing_are_options(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launch import training_run
    from tp.layers.layout import ShardTokens, automatic_layout
    from tp.models.decoder import run_layer
    from tp.training.activation_checkpointing import run_checkpointed_layer

    seen = []

    class Trainer(training_run.Trainer):
        def run(self, first_step: int = 0) -> int:
            decoder = self.learner.model.model
            seen.append((decoder.choose_layout, decoder.run_layer))
            return super().run(first_step)

    monkeypatch.setattr(training_run, "Trainer", Trainer)
    options = ["--sequence-parallel", "on", "--activation-checkpointing"]
    for name, chosen in (("plain", []), ("chosen", options)):
        assert main(train_options(inputs, tmp_path / name, "--steps", "1", "--tp", "1", *chosen)) == 0
    assert seen == [(automatic_layout, run_layer), (ShardTokens, run_checkpointed_layer)]


@pytest.mark.long
def test_what_sigterm_interrupted_is_in_the_end_the_same_bits(inputs: Path, tmp_path: Path) -> None:
    """Two ranks, two replicas of one; under torchrun the second time."""
    options = ["--steps", "60", "--tp", "1", "--dp", "2", "--micro-batch-size", "1", "--save-every", "10"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    status, _, err = finish(start([*LAUNCH, *train_options(inputs, whole, *options)]))
    assert status == 0, err
    run = start([*LAUNCH, *train_options(inputs, parts, *options)])
    wait_for_steps(parts, 7, run)
    rank = next(p for p in os.listdir("/proc") if p.isdigit() and _is_rank_of(int(p), run.pid))
    os.kill(int(rank), signal.SIGTERM)
    status, _, err = finish(run)
    assert status == 0, err
    torchrun = [*TORCHRUN, "--nproc-per-node", "2", "-m", "launch", *train_options(inputs, parts, *options, "--resume")]
    status, _, err = finish(start(torchrun, environment={"OMP_NUM_THREADS": "1"}))
    assert status == 0, err
    losses = [
        {r["step"]: r["loss"] for r in read_metrics(output / "metrics.jsonl") if r["kind"] == "step"}
        for output in (whole, parts)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 60


def _is_rank_of(process_id: int, launcher: int) -> bool:
    """A child of the launcher that was given a rank; the process that cleans up after it has none."""
    process = Path(f"/proc/{process_id}")
    try:
        parent = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
        return parent == launcher and b"\0RANK=" in b"\0" + (process / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


@pytest.mark.long
@pytest.mark.parametrize("grace, second", [("30", True), ("0.001", False)])
def test_a_second_sigterm_or_the_end_of_grace_ends_the_run(
    grace: str, second: bool, inputs: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    run = start([*LAUNCH, *train_options(inputs, output, "--steps", "9000", "--tp", "2", "--grace", grace)])
    wait_for_steps(output, 3, run)
    if second:  # while one rank cannot do anything
        ranks = [int(p) for p in os.listdir("/proc") if p.isdigit() and _is_rank_of(int(p), run.pid)]
        os.kill(ranks[0], signal.SIGSTOP)
        run.send_signal(signal.SIGTERM)
        time.sleep(1.5)
    began = time.monotonic()
    run.send_signal(signal.SIGTERM)
    status, _, err = finish(run)
    assert status == 143 and time.monotonic() - began < 10
    assert second or re.search(r"error: .*SIGTERM came 0.001 s ago .* --grace gives more time\n", err)


def test_stop_requests_are_counted_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    given_up = threading.Event()
    monkeypatch.setattr("launch.stop_request.os.kill", lambda process_id, number: ended.append(number))
    kill = lambda: signal.raise_signal(signal.SIGTERM)  # noqa: E731
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(60.0, given_up.set) as asked:
        assert not asked()
        kill()
        kill()
        assert asked() and not ended
        time.sleep(SAME_REQUEST_S + 0.05)
        kill()
        assert ended == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == before and not given_up.is_set()
    with StopRequest(0.01, given_up.set):
        kill()
        assert given_up.wait(5)


@pytest.mark.parametrize("source", ["directory", "gguf"])
@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_convert_gives_what_the_loader_reads(
    source: str, dtype: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    from tp.generation.loading import load

    config = make_config("llama")
    tensors = make_tensors(config)
    if source == "gguf":
        path = tmp_path / "model.gguf"
        write_gguf(path, config, tensors)
    else:
        path = write_directory(tmp_path / "model", config, tensors, num_files=2)
    output = tmp_path / "converted"
    command = ["convert", "--model", str(path), "--output", str(output), "--dtype", dtype, "--max-shard-size", "9000"]
    assert main([*command, "--json"]) == 0
    out, err = capfd.readouterr()
    told = json.loads(out)
    assert told["files"] == len(list(output.glob("*.safetensors"))) > 1 and "without a tokenizer" in err
    expected, found = load(str(path), dtype=dtype), load(str(output))
    assert str(found.dtype) == f"torch.{told['dtype']}" and found.dtype == expected.dtype
    for (name, tensor), other in zip(expected.named_parameters(), found.parameters(), strict=True):
        assert torch.equal(tensor, other), name
    theirs = AutoModelForCausalLM.from_pretrained(output, dtype=expected.dtype)
    assert torch.equal(theirs.get_input_embeddings().weight, expected.model.embed_tokens.weight)
    capfd.readouterr()
    assert "exists and is not an empty directory" in refusal(capfd, command)


def test_converting_says_what_it_wrote(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = make_config("llama")
    path = write_directory(tmp_path / "model", config, make_tensors(config))
    for options, files in (([], "1 file"), (["--max-shard-size", "500000"], "2 files")):
        output = tmp_path / files
        assert main(["convert", "--model", str(path), "--output", str(output), *options]) == 0
        assert f" of float32 in {files}\n" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["generate", "score"])
def test_the_layout_of_the_stream_is_an_option(command: str, tmp_path: Path) -> None:
    from launch.__main__ import build_parser
    from launch.generate import load_model
    from launch.terminal import Terminal
    from tp.layers.layout import Replicate, ShardTokens, automatic_layout
    from tp.parallel import TensorParallelGroup

    config = make_config("llama")
    path = write_directory(tmp_path / "model", config, make_tensors(config))
    for choice, rule in [([], automatic_layout), (["on"], ShardTokens), (["off"], Replicate)]:
        options = ["--sequence-parallel", *choice] if choice else []
        arguments = build_parser().parse_args([command, "--model", str(path), *options])
        model = load_model(arguments, TensorParallelGroup.alone(), Terminal.silent())
        assert model.model.choose_layout is rule
