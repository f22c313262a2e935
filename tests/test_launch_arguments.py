"""Requests that cannot be served end in one clear line, before any rank is started or any weight read."""

from __future__ import annotations

import errno
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_models import hub_config

from launch import info, inputs, ranks
from launch.__main__ import build_parser, main
from tp import choice
from tp.errors import RequestError


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(ranks, "start", refuse)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that looks like a checkpoint from outside: a config.json, and no weights."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(hub_config("qwen2")))
    return directory


def complaint(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str]:
    """Exit status and message of a command that must fail with a line or two on stderr, and nothing on stdout."""
    status = main([str(argument) for argument in argv])
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ") and output.err.endswith("\n") and output.err.count("\n") <= 2
    return status, output.err.removeprefix("error: ").strip()


@pytest.mark.parametrize(
    "options, message",
    [
        (["--prompt", "a", "--prompt-ids", "1"], "--prompt and --prompt-ids contradict each other: give one of them"),
        (["--prompt", "a", "--prompt-file", "f"], "--prompt and --prompt-file contradict each other"),
        (["--prompt", ""], "--prompt is empty: there is nothing to work on"),
        (["--prompt", "a", "--prompt", ""], "--prompt is empty (number 2 of 2)"),
        ([], "standard input is empty"),
        (["--prompt-file", "/nowhere/at-all"], "--prompt-file /nowhere/at-all cannot be read: No such file"),
        (["--prompt-ids", "1,x"], "'1,x' is not a list of token ids such as 1,2,3"),
        (["--prompt-ids", ""], "must be one or more token ids"),
        (["--prompt-ids", "3,-1"], "must be one or more token ids, none negative"),
        (["--prompt-ids", "1", "--chat"], "--chat and --prompt-ids contradict each other"),
        (["--prompt", "a", "--system", "b"], "--system needs --chat"),
        (["--prompt", "a", "--top-p", "0.5"], "top_p with temperature 0 would do nothing"),
        (["--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--prompt", "a", "--max-new-tokens", "2", "--min-new-tokens", "3"], "min_new_tokens 3 is above"),
        (["--prompt", "a", "--stop", ""], "stop is ''"),
        (["--prompt", "a", "--tp", "0"], "argument --tp: '0' is not an integer of at least 1"),
        (["--prompt", "a", "--tp", "two"], "argument --tp: 'two' is not an integer of at least 1"),
        (["--prompt", "a", "--tp", "9" * 16], "9' is more than 1e+15, the most of any count"),
        (["--prompt", "a", "--max-context", "-1"], "argument --max-context: '-1' is not"),
        (["--prompt", "a", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--prompt", "a", "--device", "cpu", "--backend", "nccl"], "--backend nccl needs GPUs"),
        (["--prompt", "a", "--nnodes", "2"], "--nnodes 2 needs --rdzv-endpoint"),
        (["--prompt", "a", "--nnodes", "2", "--rdzv-endpoint", "h:1", "--tp", "3"], "--tp 3 is not a multiple"),
        (["--prompt", "a", "--nnodes", "2", "--rdzv-endpoint", "h:1", "--tp", "1"], "--tp 1 is not a multiple"),
        (["--prompt", "a", "--node-rank", "1"], "--node-rank 1 is outside 0..0"),
        (["--prompt", "\udcff"], "--prompt is not UTF-8 text"),
        (["--prompt", "a", "--stop", "\udcff"], "--stop is not UTF-8 text"),
        (["--prompt", "a", "--chat", "--system", "\udcff"], "--system is not UTF-8 text"),
        (["--prompt", "a", "--max-new-token", "3"], "unrecognized arguments: --max-new-token 3"),
    ],
)
def test_generate_refuses(options: list[str], message: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tp_size = [] if "--tp" in options else ["--tp", "2"]
    status, said = complaint(capsys, "generate", "--model", model, *tp_size, *options)
    assert status == 2 and message in said


def test_models_that_are_plainly_wrong(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(name: str | Path, tp_size: int = 2) -> tuple[int, str]:
        return complaint(capsys, "generate", "--prompt", "a", "--model", name, "--tp", str(tp_size))

    status, said = refused(tmp_path / "absent")
    assert (status, said) == (4, f"--model {tmp_path / 'absent'}: there is no such file or directory")
    status, said = refused(tmp_path)
    assert status == 4 and "is not a checkpoint: the directory has no config.json" in said
    status, said = refused(model, tp_size=7)
    assert status == 3 and "7 is outside 1..6" in said and "num_attention_heads is 6" in said
    (model / "config.json").write_text(json.dumps(hub_config("qwen2") | {"model_type": "bert"}))
    status, said = refused(model)
    assert status == 3 and "'bert'" in said and "qwen3" in said
    (model / "config.json").write_text("{")
    status, said = refused(model)
    assert status == 4 and "config.json is not valid JSON" in said


def test_other_commands_refuse(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = complaint(capsys, "score", "--model", model, "--text", "a", "--text", "b")
    assert status == 2 and "one text" in said
    status, said = complaint(capsys, "score", "--model", model, "--text", "a", "--ids", "1")
    assert status == 2 and "--text and --ids contradict" in said
    status, said = complaint(capsys, "run", "--nproc", "2", "/nowhere/script.py")
    assert status == 2 and "/nowhere/script.py" in said
    status, said = complaint(capsys, "convert", "--model", model)
    assert status == 2 and "--output" in said and "see tp-decoder convert --help" in said
    status, said = complaint(capsys, "dance")
    assert status == 2 and "'dance'" in said
    status, said = complaint(capsys)
    assert status == 2 and "COMMAND" in said


def test_standard_input_is_a_prompt(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("été\nau bord\n".encode())))
    monkeypatch.setattr(ranks, "start", lambda *given, **options: started.append((given, options)) or 0)
    argv = ["generate", "--model", str(model), "--tp", "4", "--nnodes", "2", "--rdzv-endpoint", "host:29400"]
    assert main(argv) == 0
    (((command, placement), options),) = started
    assert command[0] == "-c" and command[2:] == argv
    assert (placement.ranks_here, placement.nodes, placement.world_size) == (2, 2, 4)
    assert options["standard_input"] == "été\nau bord"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    status, said = complaint(capsys, *argv)
    assert status == 2 and "not UTF-8" in said


def test_a_prompt_file_is_read_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be a pipe, as of <(command); ranks get its text from the launcher, to the last newline."""
    started: list[Any] = []
    monkeypatch.setattr(ranks, "start", lambda *given, **options: started.append(options) or 0)
    reader, writer = os.pipe()
    os.write(writer, b"a\r\nb\n\n")
    os.close(writer)
    argv = ["generate", "--model", str(model), "--tp", "2", "--prompt-file", f"/dev/fd/{reader}"]
    assert main(argv) == 0
    os.close(reader)
    assert started[0]["standard_input"] == "a\r\nb\n"
    (tmp_path / "read").write_text("a\n")
    monkeypatch.setenv(ranks.STANDARD_INPUT, str(tmp_path / "read"))
    for of_file in (argv, argv[:-2]):
        arguments = build_parser().parse_args(of_file)
        inputs.check(arguments)
        assert inputs.of(arguments) == ["a\n"]
    monkeypatch.delenv(ranks.STANDARD_INPUT)
    status, said = complaint(capsys, *argv[:-1], "/dev/zero")
    assert status == 2 and said.startswith("--prompt-file /dev/zero has more than 16777216 bytes")
    (tmp_path / "bytes").write_bytes(b"\xff")
    status, said = complaint(capsys, *argv[:-1], tmp_path / "bytes")
    assert status == 2 and said == f"--prompt-file {tmp_path / 'bytes'} is not UTF-8 text"


def test_a_place_that_cannot_be_looked_at_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a directory of somebody else's; pathlib raises when asked what is there."""

    def refuse() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/secret/config.json")

    monkeypatch.setattr(info, "gather", refuse)
    assert complaint(capsys, "info") == (2, "/secret/config.json cannot be used: Permission denied")


def test_the_launchers_ranks_decide_the_degree(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    arguments = build_parser().parse_args(["generate", "--model", str(model), "--prompt", "a", "--tp", "2"])
    with pytest.raises(RequestError, match="^--tp 2 contradicts the launcher, which started 3 ranks$"):
        arguments.execute(arguments)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    import tp

    for option, expected in (("--version", f"tp-decoder {tp.__version__}\n"), ("--help", "130 interrupted")):
        with pytest.raises(SystemExit) as ended:
            main([option])
        assert ended.value.code == 0
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize("command", [["info"], ["plan", "--model", "nowhere"], ["run", "--nproc", "1", "nowhere.py"]])
def test_a_mistyped_name_of_an_operation_is_refused_by_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr(choice, "_disabled", None)
    monkeypatch.setenv(choice.DISABLE_VARIABLE, "decode_graphs, share_memory")
    names = "argmax_and_sum_exp, .*, shared_memory, .*, upcast_matmul"
    status, message = complaint(capsys, *command)
    assert status == 2 and re.fullmatch(f"TP_DECODER_DISABLE knows no share_memory: its names are {names}", message)


def test_info(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(info, "CPU_FACTS", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("model name\t: A\nflags\t\t: fpu avx512_bf16 amx_tile amx_bf16 avx512bw\n" * 2)
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert (facts["cpu"], facts["cpu_bfloat16"]) == ("A", ["amx_bf16", "avx512_bf16"])
    assert facts["backends"]["gloo"] is True
    assert facts["environment"]["OMP_NUM_THREADS"] == "1"
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"  torch: {torch.__version__}\n" in text and "secret" not in text
