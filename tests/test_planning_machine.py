"""How `plan --calibrate` has ranks measure this machine: guarded, told of, and refused in words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import ROOT
from launch.measurement.cases import Case
from launch.measurement.contestants import Field
from launch.measurement.errors import ContestantError
from launch.measurement.interleaving import interleave
from launch.measurement.requests import DecodeAnswer
from launch.planning import machine
from launch.process_tree import PROC, ProcessTree

ENDLESS = "import sys, time; print('measuring', file=sys.stderr); time.sleep(600)"
FAILING = "import sys; print('error: no memory left', file=sys.stderr); sys.exit(7)"
MEASURES_FOREVER = """
from launch.planning import machine
machine.RANK_MODULE = "ranks_that_pretend"
machine.measure_ranks(1, machine.Measurements())
"""


@pytest.fixture
def pretend(tmp_path, monkeypatch):
    """`pretend(script)`: what measures on each rank."""
    monkeypatch.setattr(machine, "RANK_MODULE", "ranks_that_pretend")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda script: (tmp_path / "ranks_that_pretend.py").write_text(script)


def running(pid: int) -> bool:
    return pid in ProcessTree(pid).members()


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def measures(pid: int) -> bool:
    try:
        return "-m\0ranks_that_pretend" in (PROC / str(pid) / "cmdline").read_text()
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux's /proc")
def test_what_ends_a_calibration_ends_the_ranks_that_measure(pretend, tmp_path):
    pretend(ENDLESS)
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    measuring = subprocess.Popen([sys.executable, "-c", MEASURES_FOREVER], cwd=ROOT, env=environment)
    try:
        tree = ProcessTree(measuring.pid)
        wait_for(lambda: any(map(measures, tree.members())))
        ranks = [pid for pid in tree.members() if measures(pid)]
        measuring.send_signal(signal.SIGTERM)
        assert measuring.wait(20) == -signal.SIGTERM
        wait_for(lambda: not any(map(running, ranks)))
        assert [path.name for path in tmp_path.iterdir()] == ["ranks_that_pretend.py"]
    finally:
        measuring.kill()
        measuring.wait()


def test_ranks_that_fail_are_told_of_once(pretend):
    pretend(FAILING)
    with pytest.raises(ContestantError) as caught:
        machine.measure_ranks(1, machine.Measurements())
    assert str(caught.value) == "measuring 1 rank: it ended with status 7: no memory left"


class StubReader:
    name = "reads"

    def __init__(self, processes, threads):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def bytes_per_second(self):
        return 1e9


def test_progress_says_how_far_a_round_is(monkeypatch):
    told = []
    monkeypatch.setattr(machine, "tell", told.append)
    interleave({"a": lambda: 1.0, "b": lambda: 1.0}, rounds=2, watch=machine._teller(2))
    assert [text.partition(":")[0] for text in told] == [
        "warm-up, turn 1 of 2", "warm-up, turn 2 of 2", "round 1 of 2, turn 1 of 2", "round 1 of 2, turn 2 of 2",
        "round 2 of 2, turn 1 of 2", "round 2 of 2, turn 2 of 2",
    ]  # fmt: skip


def test_decode_has_two_turns_a_round_and_all_of_them_count(monkeypatch):
    class Answering(Field):
        def load(self, contestants, watch, timeout_s=1.0):
            self.facts = {contestant.name: {} for contestant in contestants}

        def decode(self, name, request, timeout_s):
            return DecodeAnswer(1.0, 1.0, 1.0, 1.0, ())

    monkeypatch.setattr(machine, "Field", Answering)
    monkeypatch.setattr(machine, "ReadBandwidth", StubReader)
    prefill, decode = Case("prefill", 1, 16, 1), Case("decode", 1, 16, 24)
    measured = machine.Measurements()
    machine.measure_models([1], "float32", [machine.Subject("m", "{}", 100, (prefill, decode))], measured, rounds=3)
    counts = {case.phase: len(answers) for (_, _, case), answers in measured.answers.items()}
    assert counts == {"prefill": 3, "decode": 6}


@pytest.mark.long
def test_two_ranks_measure_their_collectives_and_themselves():
    measured = machine.Measurements()
    machine.measure_ranks(2, measured)
    assert {each.operation for each in measured.collectives} == {
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "broadcast",
    }
    assert all(each.ranks == 2 and each.line.cost(1 << 20).seconds > 0 for each in measured.collectives)
    assert 50e6 < measured.runtime_bytes < 5e9
