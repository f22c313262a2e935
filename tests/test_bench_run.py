"""`bench` from its command line to its files: with engines that only pretend to compute, then once with real ones."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from tiny_models import hub_config

from launch.__main__ import main
from launch.benching import engines, measure, options, recorder
from launch.benching.plots import data_of
from launch.benching.results_file import read_results
from launch.measurement.child import Command
from launch.measurement.contestants import Contestant
from launch.measurement.read_bandwidth import ReadBandwidth
from launch.measurement.reader import PIECE_BYTES
from launch.process_tree import ProcessTree

SWEEP = [
    "--tp",
    "2",
    "--prompt-tokens",
    "8",
    "--new-tokens",
    "3",
    "--dtype",
    "float32",
    "--runs",
    "1",
    "--device",
    "cpu",
]
ENGINE = """
import json, sys
ranks = int(sys.argv[1])
print(json.dumps({"ready": {}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    inside = {"calls": 20, "bytes": 4000, "seconds": [0.002, 0.001]} if ranks > 1 else None
    if asked.get("kind") == "rate":
        answer = 1e9 * ranks
    elif asked.get("kind") == "train":
        answer = {"milliseconds": 50.0 * ranks, "loss": 4.0, "communication": inside}
    else:
        ids = [[7] * asked["new_tokens"] for _ in asked["prompt_ids"]]
        answer = {"ttft_ms": 20.0 * ranks, "tpot_ms": 5.0 * ranks, "step_ms": 5.0 * ranks,
                  "tokens_per_s": 200.0 / ranks, "new_ids": ids,
                  "prefill_communication": inside, "decode_communication": inside}
    print(json.dumps({"answer": answer}), flush=True)
"""
"""It takes twice as long on two ranks."""
FAILS_TO_TRAIN = ENGINE.replace('== "train":', '== "train" and (ranks == 1 or sys.exit("no memory left")):')


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(hub_config("llama")))
    return str(path)


@pytest.fixture(autouse=True)
def small_machine(monkeypatch):
    """Of two cores, whatever this one has, whose limits are looked at for moments."""
    monkeypatch.setattr(options, "own_cores", lambda: range(2))
    monkeypatch.setattr(ReadBandwidth.__init__, "__defaults__", (2 * PIECE_BYTES,))
    monkeypatch.setattr(ReadBandwidth.bytes_per_second, "__defaults__", (0.02,))
    monkeypatch.setattr(measure, "RATE_S", 0.02)


@pytest.fixture
def engine(monkeypatch):
    """`engine(script)`: what contestants of this project are."""

    def use(script):
        def contestant(task, processes, threads):
            return Contestant(
                "own", processes, threads, lambda: Command([sys.executable, "-c", script, str(processes)])
            )

        monkeypatch.setattr(engines.own, "contestant", contestant)
        monkeypatch.setattr(engines.own_training, "contestant", contestant)

    return use


def command(config_file, *more):
    return ["bench", "--config", config_file, *SWEEP, *map(str, more)]


def descendants():
    return set(ProcessTree(os.getpid()).members()) - {os.getpid()}


def test_a_speed_up_below_one_is_printed_as_such(config_file, engine, capsys):
    engine(ENGINE)
    before = descendants()
    assert main(command(config_file)) == 0
    shown = capsys.readouterr()
    assert shown.out.count("0.50x (0.50 to 0.50): slower than t = 1") == 6
    assert "t = 2, replicate (2 x 1)" in shown.out and "t = 1 (1 x 2)" in shown.out
    assert "2.00 ms, 5%" in shown.out  # of 40 ms of prefill
    assert shown.err.count("slower than t = 1") == 6
    assert descendants() <= before


def test_who_fails_is_listed_and_the_others_go_on(config_file, engine, tmp_path, capsys):
    engine(FAILS_TO_TRAIN)
    path = tmp_path / "rows.jsonl"
    assert main(command(config_file, "--json", path)) == 0
    assert "failed: own tp=2 (training in float32): it ended with status 1: no memory left" in capsys.readouterr().out
    rows = read_results(path)[1]
    assert [row.form.tp_size for row in rows if row.case.phase == "train"] == [1]
    assert len(rows) == 7
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["contestant"] for line in lines if line["kind"] == "failure"] == ["own tp=2"]

    engine(ENGINE)  # with more memory the missing case alone is measured again
    assert main(command(config_file, "--json", path, "--resume")) == 0
    shown = capsys.readouterr()
    assert "decode" not in shown.err and "train, float32" in shown.err
    assert len(read_results(path)[1]) == 9 and "failed" not in path.read_text() + shown.out


def test_peers_take_part_in_what_they_can(engine, tmp_path, monkeypatch, capsys):
    """llama.cpp answers as fast as t = 1; vLLM is not installed."""

    def absent(task, processes, threads):
        return Contestant("vllm", processes, threads, lambda: Command(["/nowhere/python"]))

    def llama(task, processes, threads):
        return Contestant("llama_cpp", processes, threads, lambda: Command([sys.executable, "-c", ENGINE, "1"]))

    engine(ENGINE)
    monkeypatch.setitem(engines.PEERS, "vllm", absent)
    monkeypatch.setitem(engines.PEERS, "llama_cpp", llama)
    path = tmp_path / "rows.jsonl"
    more = ["--phases", "decode,train", "--compare", "vllm,llama_cpp", "--json", str(path)]
    assert main(["bench", "--model", str(Path(engines.__file__).parents[1] / "embedded_model"), *SWEEP, *more]) == 0
    rows = {(row.case.phase, row.form.name): row for row in read_results(path)[1]}
    assert [name for phase, name in rows if phase == "train"] == ["own tp=1", "own tp=2 replicate", "own tp=2 sharded"]
    peer = rows["decode", "llama_cpp tp=1"]
    assert peer.speed_up.median == 1.0 and peer.efficiency is peer.collectives is None
    assert peer.form.threads == 2 and peer.limit.of == "memory"
    shown = capsys.readouterr().out
    for name in ("vllm tp=1", "vllm tp=2"):
        assert f"failed: {name} (serving in float32): /nowhere/python cannot be started" in shown


def test_an_interruption_leaves_rows_and_no_process(config_file, engine, tmp_path, monkeypatch, capsys):
    engine(ENGINE)
    path = tmp_path / "rows.jsonl"
    before = descendants()
    turns = []

    def interrupted(self, case, turn):
        turns.append(turn)
        if case.phase == "decode":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(recorder.Recorder, "turn", interrupted)
    assert main(command(config_file, "--json", path)) == 130
    assert f"interrupted: --resume goes on with {path}" in capsys.readouterr().err
    assert descendants() <= before
    assert {row.case.phase for row in read_results(path)[1]} == {"prefill"}
    monkeypatch.undo()


def test_more_degrees_take_nothing_from_the_file_before_they_are_measured(config_file, engine, tmp_path, monkeypatch):
    engine(ENGINE)
    path = tmp_path / "rows.jsonl"
    options = ["--phases", "prefill", "--json", path, "--resume"]
    assert main(command(config_file, *options, "--tp", "1")) == 0
    before = path.read_bytes()
    assert len(read_results(path)[1]) == 1
    with monkeypatch.context() as patched:
        patched.setattr(recorder.Recorder, "turn", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        assert main(command(config_file, *options)) == 130
    assert path.read_bytes() == before
    assert main(command(config_file, *options)) == 0
    assert [row.form.tp_size for row in read_results(path)[1]] == [1, 2, 2]


@pytest.mark.long
def test_a_sweep_of_real_ranks(config_file, tmp_path, capsys):
    path, page, plots = tmp_path / "rows.jsonl", tmp_path / "page.md", tmp_path / "plots"
    files = ["--json", path, "--markdown", page, "--plots", plots]
    assert main(command(config_file, *files)) == 0
    shown = capsys.readouterr()
    settings, rows = read_results(path)
    assert settings["weights"] == "random" and settings["runs"] == 1 and settings["threads"] == 2
    assert [(row.case.phase, row.form.name) for row in rows] == [
        (phase, name)
        for phase in ("prefill", "decode", "train")
        for name in ("own tp=1", "own tp=2 replicate", "own tp=2 sharded")
    ]
    for row in rows:
        assert row.milliseconds.minimum > 0 and row.milliseconds.count == 1
        assert row.speed_up is not None and row.efficiency is not None
        assert row.limit.share.median > 0
        assert row.limit.of == ("memory" if row.case.phase == "decode" else "matrix products")
        assert (row.collectives is None) == (row.form.tp_size == 1)
        if row.collectives is not None:
            assert row.collectives.calls >= 2 * 2 + 1 and 0 < row.collectives.share.median < 1
    assert "collectives a layer" in shown.out
    assert "prefill, float32, batch 1, 8 tokens, strong scaling: own tp=1" in shown.err
    assert "### decode, float32, batch 1, 8 + 3 tokens, strong scaling" in page.read_text()
    drawn = {path.name: data_of(path.read_bytes()) for path in plots.iterdir()}
    assert drawn.keys() == {"strong-efficiency.png", "strong-speed-up.png", "strong-time.png"} and all(drawn.values())

    before = path.read_text()
    assert main(command(config_file, *files, "--resume")) == 0  # nothing is left to be measured
    assert path.read_text() == before and "loading" not in capsys.readouterr().err
    assert main(command(config_file, *files, "--resume", "--runs", "2")) == 2
    assert main(command(config_file, *files)) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and all(line.startswith("error: --") for line in told)
