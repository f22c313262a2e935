"""The real commands in processes of their own: one rank, several, torchrun; and how a run ends when a rank fails."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_checkpoint

from launch.__main__ import main

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = [sys.executable, "-m", "launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
ENDS_WITHIN_S = 10


def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("environment", {})}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **{**pipes, **options})


def finish(process: subprocess.Popen[str], timeout: float = 120, said: str | None = None) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(said, timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a tokenizer of bytes: the sky is [83, 71, 68, 220, 82, 74, 88]."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    directory = write_checkpoint(tmp_path_factory.mktemp("launch") / "model", vocab_size=263)
    vocabulary = {byte: token_id for token_id, byte in enumerate(sorted(ByteLevel.alphabet()))}
    Qwen2Tokenizer(vocab=vocabulary, merges=[]).save_pretrained(directory)
    return directory


def test_generate_is_the_same_at_every_degree_and_from_either_launcher(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = ["--prompt", "the sky", "--prompt", "w"]
    ids = ["--prompt-ids", "83,71,68,220,82,74,88", "--prompt-ids", "86"]
    options = ["--model", str(model), "--max-new-tokens", "9", "--device", "cpu", "--json"]
    runs = {
        3: start([*LAUNCH, "generate", "--tp", "3", *prompts, *options]),
        2: start([*TORCHRUN, "--nproc-per-node", "2", "-m", "launch", "generate", *ids, *options]),
    }
    assert main(["generate", "--tp", "1", *prompts, *options]) == 0
    single = json.loads(capfd.readouterr().out)
    assert single["tp_size"] == 1 and single["communication"] == {"calls": 0, "bytes": 0, "seconds": 0.0}
    assert single["sequences"][0]["text"]
    (whole,) = single["ranks"]
    for tp_size, process in runs.items():
        status, out, err = finish(process)
        assert status == 0, err
        parallel = json.loads(out)  # exactly one object
        check_same(single, parallel)
        assert parallel["tp_size"] == tp_size and len(parallel["ranks"]) == tp_size
        assert parallel["communication"]["calls"] > 0 < parallel["communication"]["bytes"]
        read = [rank["checkpoint_bytes_read"] for rank in parallel["ranks"]]
        assert max(read) < whole["checkpoint_bytes_read"] <= sum(read)
        assert parallel["timings"]["load_s"] > 0 < parallel["timings"]["tokens_per_s"]
    assert err.count("rank") == 0


def check_same(single: dict[str, Any], parallel: dict[str, Any]) -> None:
    assert [sequence["prompt_ids"] for sequence in parallel["sequences"]] == [[83, 71, 68, 220, 82, 74, 88], [86]]
    for one, other in zip(single["sequences"], parallel["sequences"], strict=True):
        assert other["new_ids"] == one["new_ids"] and len(one["new_ids"]) == 9
        assert other["text"] == one["text"]
        assert other["finish_reason"] == "length"
        assert other["logprobs"] == pytest.approx(one["logprobs"], abs=1e-4)


def test_generate_streams_text_and_ends_with_a_table(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(model), "--tp", "1", "--device", "cpu", "--max-new-tokens", "3"]
    assert main(["generate", *options, "--prompt", "the sky"]) == 0
    out, err = capfd.readouterr()
    assert len(out) >= 2 and out.endswith("\n") and "time to first token" in err and "collectives" not in err
    assert main(["generate", *options, "--prompt", "a", "--prompt", "b"]) == 0
    assert "\n--- prompt 2 of 2 ---\n" in capfd.readouterr().out


def test_score_agrees_with_generate(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(model), "--device", "cpu", "--tp", "1"]
    assert main(["generate", *options, "--prompt-ids", "83,71", "--max-new-tokens", "3", "--json"]) == 0
    (sequence,) = json.loads(capfd.readouterr().out)["sequences"]
    ids = [*sequence["prompt_ids"], *sequence["new_ids"]]
    assert main(["score", *options, "--ids", ",".join(map(str, ids)), "--json"]) == 0
    scored = json.loads(capfd.readouterr().out)
    assert scored["token_ids"] == ids and scored["tokens"][:2] == ["t", "h"]
    assert scored["logprobs"][1:] == pytest.approx(sequence["logprobs"], abs=1e-4)
    assert main(["score", *options, "--text", "the"]) == 0
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert lines[1] == ["-", "83", '"t"'] and lines[2] == [f"{scored['logprobs'][0]:.4f}", "71", '"h"']
    perplexity = math.exp(-(float(lines[2][0]) + float(lines[3][0])) / 2)
    assert lines[4][0] == "perplexity" and float(lines[4][1]) == pytest.approx(perplexity, rel=1e-3)


def test_an_error_that_all_ranks_raise_is_told_once(model: Path) -> None:
    command = [*LAUNCH, "generate", "--model", str(model), "--device", "cpu", "--max-context", "3", "--tp", "2"]
    status, out, err = finish(start(command, stdin=subprocess.PIPE), said="the sky\n")
    assert (status, out) == (2, "")
    assert err.startswith("error: prompt 0 has 7 tokens, the context 3") and err.count("\n") == 1


@pytest.mark.long
def test_a_rank_tells_of_a_path_that_is_no_text(tmp_path: Path) -> None:
    directory = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(directory)
    command = [*LAUNCH, "generate", "--device", "cpu", "--prompt-ids", "1", "--model", os.fsdecode(directory)]
    status, out, err = finish(start(command, environment={"RANK": "0", "WORLD_SIZE": "1"}))
    assert (status, out, err.count("\n")) == (4, "", 1)
    assert err.startswith("error: ") and "\\udcff is not a checkpoint" in err


@pytest.mark.long
def test_torchrun_tells_such_an_error_once_too(model: Path) -> None:
    command = ["-m", "launch", "generate", "--model", str(model), "--device", "cpu", "--prompt-ids", "1,2,3"]
    status, out, err = finish(start([*TORCHRUN, "--nproc-per-node", "2", *command, "--max-context", "3"]))
    assert status != 0 and out == "" and err.count("error: prompt 0 has 3 tokens, the context 3") == 1


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
from tp.parallel import TensorParallelGroup

group = TensorParallelGroup.from_environment("gloo", "cpu")
group.communicator.all_reduce(torch.ones(3))
Path(sys.argv[2], str(group.rank)).write_text(f"{os.getpid()} {time.time()} {os.environ['OMP_NUM_THREADS']}")
if group.rank == 1 and sys.argv[1] == "raise":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise ValueError("boom on purpose")
if group.rank == 0 and sys.argv[1] == "raise":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it cannot be asked to end
    time.sleep(600)
if sys.argv[1] == "wait" and group.rank == 1:
    time.sleep(600)
group.communicator.all_reduce(torch.ones(5))
sys.stdout.write(f"rank {group.rank}\\n")  # at once: the ranks share it
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def wait_for_ranks(directory: Path, count: int) -> list[int]:
    """Process ids of the ranks, once all have come to where they fail."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        contents = [path.read_text().split() for path in directory.glob("[0-9]")]
        if len(contents) == count and all(contents):
            return [int(content[0]) for content in contents]
        time.sleep(0.05)
    raise AssertionError("the ranks did not start")


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    "how, last_lines",
    [
        ("raise", ["ValueError: boom on purpose", "error: rank 1 of 2 failed with ValueError: boom on purpose"]),
    ],
)
def test_a_rank_that_fails_ends_the_run(how: str, last_lines: list[str], script: Path, tmp_path: Path) -> None:
    """The others wait in a collective, or do not listen to SIGTERM."""
    run = start([*LAUNCH, "run", "--nproc", "2", str(script), how, str(tmp_path)])
    process_ids = wait_for_ranks(tmp_path, 2)
    began = time.monotonic()
    status, out, err = finish(run, timeout=60)
    assert time.monotonic() - began < ENDS_WITHIN_S
    assert (status, out) == (7, "")
    assert err.splitlines()[-len(last_lines) :] == last_lines and err.count("rank 1") == 1
    assert "rank 0" not in err and "launch" not in err
    assert not any(is_running(process_id) for process_id in process_ids)


def test_ranks_end_with_their_launcher(script: Path, tmp_path: Path) -> None:
    run = start([*LAUNCH, "run", "--nproc", "2", str(script), "wait", str(tmp_path)])
    process_ids = wait_for_ranks(tmp_path, 2)
    run.send_signal(signal.SIGINT)
    status, out, err = finish(run, timeout=ENDS_WITHIN_S)
    assert (status, out, err) == (130, "", "")
    deadline = time.monotonic() + 5
    while any(is_running(process_id) for process_id in process_ids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(process_id) for process_id in process_ids)


@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_reader_that_has_seen_enough_is_no_error(model: Path, tp_size: int) -> None:
    options = ["--model", str(model), "--device", "cpu", "--max-new-tokens", "100", "--prompt-ids", "5"]
    process = start([*LAUNCH, "generate", "--tp", str(tp_size), *options])
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(30) == 0


@pytest.mark.long
def test_run_starts_a_script_as_torchrun_does(script: Path, tmp_path: Path) -> None:
    status, out, err = finish(start([*LAUNCH, "run", "--nproc", "2", str(script), "go", str(tmp_path)]))
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == ["rank 0", "rank 1"]
    cores = len(os.sched_getaffinity(0))
    assert {path.read_text().split()[2] for path in tmp_path.glob("[0-9]")} == {str(max(1, cores // 2))}
