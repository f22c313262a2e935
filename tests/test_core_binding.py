"""Each CPU rank on its share of the host's cores, and on all of them where that would be wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tp import choice
from tp.parallel import core_binding
from tp.parallel.communicator import AloneCommunicator
from tp.parallel.core_binding import RankPlace, bind_to_own_cores, share_of_cores

ROOT = Path(__file__).resolve().parents[1]


def place(*cores, host="one", threads=1, enabled=True):
    return RankPlace(host, frozenset(cores), threads, enabled)


def shares(places):
    return [share_of_cores(places, rank) for rank in range(len(places))]


@pytest.mark.parametrize(
    ("cores", "threads", "expected"),
    [
        ((0, 1), 1, [{0}, {1}]),
        ((9, 3, 5, 7), 2, [{3, 5}, {7, 9}]),
        ((0, 1, 2, 3, 4, 5, 6, 7), 2, [{0, 1}, {2, 3}, {4, 5}]),
        ((0, 1, 2), 1, [{0}, {1}, {2}]),
    ],
)
def test_ranks_share_the_cores_evenly(cores, threads, expected):
    assert shares([place(*cores, threads=threads)] * len(expected)) == expected


@pytest.mark.parametrize(
    "places",
    [
        [place(0, 1)],
        [place(0, 1)] * 3,
        [place(0, 1, 2, 3, threads=1), place(0, 1, 2, 3, threads=3)],
        [place(0, 1), place(2, 3)],
        [place(0, 1, 2, 3), place(0, 1)],
        [place(0, 1), place(0, 1, enabled=False)],
    ],
    ids=["alone", "more ranks than cores", "more threads than cores", "dealt out", "another has fewer", "off"],
)
def test_ranks_keep_what_they_have(places):
    assert shares(places) == [None] * len(places)


def test_each_host_is_divided_by_itself():
    places = [place(0, 1), place(4, 5, host="other"), place(0, 1), place(4, 5, host="other")]
    assert shares(places) == [{0}, {4}, {1}, {5}]


def test_a_process_that_may_not_choose_is_warned_once(monkeypatch):
    def refuse(pid, cores):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(core_binding, "share_of_cores", lambda places, rank: frozenset({0}))
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    monkeypatch.setattr(choice, "_warned", set())
    with pytest.warns(RuntimeWarning, match="core_binding: .* may not choose its cores: Operation not permitted"):
        bind_to_own_cores(AloneCommunicator())


SCRIPT = """
import json, os, sys, threading
from tp.parallel.group import TensorParallelGroup

group = TensorParallelGroup.from_environment(device="cpu")
found = []
thread = threading.Thread(target=lambda: found.append(sorted(os.sched_getaffinity(0))))
thread.start()
thread.join()
everyone = group.communicator.all_gather_object((sorted(os.sched_getaffinity(0)), found[0]))
if group.rank == 0:
    print(json.dumps(everyone))
group.close()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="takes two cores")
def test_ranks_of_a_run_and_their_threads_are_bound(tmp_path):
    script = tmp_path / "cores.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "launch", "run", "--nproc", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // 2
    assert json.loads(done.stdout) == [[cores[:each]] * 2, [cores[each : 2 * each]] * 2]
