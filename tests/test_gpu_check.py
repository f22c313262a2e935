"""`benchmarks/gpu_check.py` where there is no GPU: a dry run of all its parts, and how it takes failures."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_parts import decoding
from benchmarks.gpu_parts.machine import the_gpu
from benchmarks.gpu_parts.record import Record, require

ROOT = Path(__file__).parent.parent


@pytest.mark.long
def test_a_dry_run_of_all_parts(tmp_path):
    results = tmp_path / "results.json"
    command = [sys.executable, "benchmarks/gpu_check.py", "--cpu", "--json", str(results)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout + child.stderr
    content = json.loads(results.read_text())
    assert content["dry_run"]
    assert set(gpu_check.BUDGETS_S) <= {result["part"] for result in content["results"]}
    names = {result["name"] for result in content["results"]}
    assert {"two_shot torch.bfloat16", "tiny decode, batch 2, captured", "loss and gradients against float64"} <= names


def test_what_runs_on_a_gpu_can_be_described_without_one():
    with mock.patch("torch.cuda.current_device", return_value=0):
        assert the_gpu().capture.size(5) == 8


def test_a_part_that_takes_too_long_is_ended_and_told():
    arguments = argparse.Namespace(cpu=True)
    (result,) = gpu_check.results_of("environment", 0.05, arguments)
    assert result["failure"] == "was ended after 0 s"
    assert gpu_check.line_of(result) == "FAILED  environment: the process: was ended after 0 s"


def test_a_failure_keeps_what_was_found_and_goes_no_further(tmp_path):
    record = Record(tmp_path / "record", "norms")
    with record.attempt("first") as found:
        found["norm_ulps"] = 9.0
        require(found["norm_ulps"] <= 8, "9 is more than 8")
    with record.attempt("second") as found:
        found["milliseconds"] = {"median": 0.5}
    first, second = map(json.loads, (tmp_path / "record").read_text().splitlines())
    assert (first["norm_ulps"], first["failure"]) == (9.0, "OutOfBoundsError: 9 is more than 8")
    assert gpu_check.line_of(second) == "ok      norms: second: milliseconds 0.5"


def test_a_model_that_fails_does_not_stop_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", mock.Mock(side_effect=RuntimeError("CUDA error")))
    monkeypatch.setattr(decoding, "copy_bandwidth", mock.Mock())
    machine = the_gpu()
    decoding.run(Record(tmp_path / "record", "decoding"), machine)
    results = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
    assert [result["name"] for result in results] == [f"{name} prefill of 512" for name in machine.models]
    assert {result["failure"] for result in results} == {"RuntimeError: CUDA error"}


def test_the_parts_fit_into_six_minutes():
    assert gpu_check.TOTAL_S < 360
    assert sum(gpu_check.BUDGETS_S.values()) <= gpu_check.TOTAL_S + 30
