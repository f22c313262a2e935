"""What the user sees: tokens as they come, the JSON object, the table; and the devices that ranks are bound to."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launch.report import Communication, RankMemory, Report, size
from launch.streaming import view_of
from launch.terminal import Terminal
from tp.errors import CommunicationError, RequestError
from tp.generation import GeneratedSequence, GenerationResult, Timings, TokenEvent
from tp.parallel import TensorParallelGroup


def shown(num_prompts: int, events: list[TokenEvent], *, has_text: bool = True, quiet: bool = False) -> list[str]:
    view = view_of(num_prompts, has_text=has_text, quiet=quiet)
    return [view.text_for(event) for event in events]


def test_one_prompt_is_shown_live() -> None:
    events = [TokenEvent(0, 5, "On", -0.1), TokenEvent(0, 6, "", -0.1), TokenEvent(0, 7, "ce ", -0.1, "length")]
    assert shown(1, events) == ["On", "", "ce \n"]
    assert shown(1, events, has_text=False) == ["5 ", "6 ", "7\n"]
    assert shown(1, events, quiet=True) == ["", "", ""]


def test_several_prompts_are_shown_in_order_once_complete() -> None:
    events = [
        TokenEvent(0, 1, "a", 0.0),
        TokenEvent(1, 2, "x", 0.0, "stop"),
        TokenEvent(2, 3, "p", 0.0),
        TokenEvent(0, 4, "b", 0.0, "length"),
        TokenEvent(2, 5, "q", 0.0, "stop"),
    ]
    first = "--- prompt 1 of 3 ---\nab\n--- prompt 2 of 3 ---\nx\n"
    assert shown(3, events) == ["", "", "", first, "--- prompt 3 of 3 ---\npq\n"]


def report(tp_size: int = 2) -> Report:
    sequence = GeneratedSequence(0, (1, 2), (3, 4), "ça", "length", (-0.5, -1.5))
    ranks = (RankMemory(1_500_000, 2_000, 1_400_000, 3_000_000_000), RankMemory(1_700_000, 2_000, 1_600_000, 10**9))
    return Report(
        model="m",
        tp_size=tp_size,
        dtype="float32",
        weights="plain",
        device="cpu",
        result=GenerationResult((sequence,), Timings(0.25, 0.05, 20.0), 2000),
        load_s=1.5,
        seconds=0.5,
        ranks=ranks[:tp_size],
        communication=Communication(1234, 56_000, 0.1),
    )


def test_the_json_object() -> None:
    assert json.loads(report().json()) == {
        "model": "m",
        "tp_size": 2,
        "dtype": "float32",
        "weights": "plain",
        "device": "cpu",
        "sequences": [
            {
                "prompt_ids": [1, 2],
                "new_ids": [3, 4],
                "text": "ça",
                "finish_reason": "length",
                "logprobs": [-0.5, -1.5],
            }
        ],
        "timings": {"load_s": 1.5, "ttft_ms": 250.0, "tpot_ms": 50.0, "tokens_per_s": 20.0},
        "ranks": [
            {"weight_bytes": w, "kv_bytes": 2000, "checkpoint_bytes_read": c, "peak_rss_bytes": p}
            for w, c, p in ((1_500_000, 1_400_000, 3_000_000_000), (1_700_000, 1_600_000, 1_000_000_000))
        ],
        "communication": {"calls": 1234, "bytes": 56_000, "seconds": 0.1},
    }


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    report().print_to(Terminal.of_process().console)
    printed = capsys.readouterr()
    rows = {
        cells[1].strip(): cells[2].strip() for line in printed.err.splitlines() if len(cells := line.split("│")) == 4
    }
    assert printed.out == "" and printed.err.startswith("m, 2 ranks, float32 on cpu\n")
    assert rows == {
        "load time": "1.50 s",
        "time to first token": "250.0 ms",
        "time per output token": "50.0 ms",
        "decode": "20.0 tokens/s",
        "weights a rank": "1.5 MB to 1.7 MB",
        "KV cache a rank": "2.0 kB",
        "checkpoint read a rank": "1.4 MB to 1.6 MB",
        "peak memory a rank": "1.0 GB to 3.0 GB",
        "collectives": "1,234, 56.0 kB",
        "time in them": "0.10 s, 20 % of 0.50 s",
    }
    assert size(0) == "0 B" and size(999) == "999 B"


def test_ranks_that_do_not_speak(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal.silent()
    terminal.show("text")
    terminal.console.print("table")
    with terminal.progress("loading") as progress:
        assert progress is None
    assert capsys.readouterr() == ("", "")


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_shows_no_amount_before_one_is_known() -> None:
    for reports, shown in (([], []), ([(1_200_000, 4_000_000)], ["1.2/4.0 MB"])):
        drawn = FakeTerminal()
        terminal = Terminal(io.StringIO(), drawn)
        with terminal.progress("loading") as progress:
            assert progress is not None
            for done, total in reports:
                progress(done, total)
        assert "loading" in drawn.getvalue()
        assert list(dict.fromkeys(re.findall(r"\S+ (?:MB|bytes|MiB)", drawn.getvalue()))) == shown


def test_characters_that_the_terminals_encoding_lacks_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    Terminal.of_process().show("Né ☃\n")
    assert written.getvalue() == b"N? ?\n"


def test_a_full_disk_is_a_clear_error() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        terminal = Terminal(full, full)
        with pytest.raises(RequestError, match="^standard output cannot be written: No space left on device$"):
            terminal.show("text")


CLOSED = """
import os, sys
from launch.terminal import open_closed_streams
open_closed_streams()
print("unseen")
print("unseen", file=sys.stderr)
opened = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
os.write(opened, f"{opened > 2} {sys.stdin.read()!r} {os.get_inheritable(1)}".encode())
"""


def test_streams_that_were_closed_are_the_null_device(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLOSED, str(tmp_path / "out")]
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
    assert subprocess.run(shell, cwd=Path(__file__).parent.parent).returncode == 0
    assert (tmp_path / "out").read_text() == "True '' True"


def test_more_ranks_than_gpus_are_refused_before_nccl_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL itself would say "Duplicate GPU detected", or hang."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *a, **k: pytest.fail("group made"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CommunicationError, match="^2 ranks on this host but 1 GPUs: .*--backend gloo"):
        TensorParallelGroup.from_environment("nccl", "cuda")
    with pytest.raises(CommunicationError, match="--device cpu"):
        TensorParallelGroup.from_environment("nccl", "cpu")


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"WORLD_SIZE": "2"}, "RANK expected, but not set"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR expected, but not set"),
        ({"WORLD_SIZE": "two"}, "'two'"),
    ],
)
def test_half_of_a_launchers_environment(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a batch system may leave it to a process that is to run alone."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CommunicationError, match=f"are not complete: .*{message}.*; start with torchrun"):
        TensorParallelGroup.from_environment("gloo", "cpu")


def test_the_device_is_bound_before_the_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective before set_device puts every rank on the first GPU."""
    order: list[object] = []

    class Made(Exception):
        pass

    def make_group(*args: object, **kwargs: object) -> None:
        order.append("group")
        raise Made

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: order.append(str(device)))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "init_process_group", make_group)
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Made):
        TensorParallelGroup.from_environment("nccl")
    assert order == ["cuda:1", "group"]


def test_threads_are_dealt_out_to_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from launch.ranks import threads_a_rank

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)), raising=False)
    assert [threads_a_rank(ranks) for ranks in (1, 2, 3, 7, 8)] == [7, 3, 2, 1, 1]
