"""Ranks die together, quickly, and the culprit is named; with the launcher goes all that it has started."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faulty_runs import LAUNCH, ROOT, TIMEOUT_S, TORCHRUN, Fault, Outcome, Run, is_running
from pool import RankPool

from launch import failures, heartbeat, process_tree
from launch import ranks as launched_ranks
from launch.failures import Failure
from launch.heartbeat import POLL_S, SILENCE_S, RankWatch, Signs
from launch.process_guard import MARK, ProcessGuard
from launch.process_tree import ProcessTree
from launch.ranks import Placement
from tp.errors import LostPeerError, RankFailedError, RequestError
from tp.parallel import TensorParallelGroup
from tp.parallel.timeouts import timeout_of
from tp.training.groups import TrainingGroups

ENDS_WITHIN_S = 10.0
"""All processes, once the failure can be noticed."""
AT_ONCE = 2
"""Runs: with more on two cores, one rank can be ready many seconds before another."""
PATIENCE_S = {"stop": SILENCE_S, "absent": TIMEOUT_S}
ENDING = {
    "raise": (RankFailedError, "failed with ValueError: boom on purpose"),
    "memory": (RankFailedError, "failed with MemoryError"),
    "typed": (RequestError, "refused on purpose"),
    "kill": (RankFailedError, "was killed by SIGKILL (out of memory?)"),
    "stop": (RankFailedError, "no heartbeat for 10 s: it was stopped, or hangs"),
    "absent": (LostPeerError, ""),
}
"""By cause: whose exit status the run ends with, and what its last line says."""


def outcomes(faults: list[Fault], directory: Path) -> list[Outcome]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        numbered = [(fault, directory / str(number)) for number, fault in enumerate(faults)]
        return list(pool.map(lambda each: Run(*each).outcome(), numbered))


def check(fault: Fault, outcome: Outcome) -> None:
    kind, said = ENDING[fault.cause]
    told = f"{fault}: {outcome}"
    assert outcome.status == kind.exit_code, told
    assert outcome.seconds < ENDS_WITHIN_S + PATIENCE_S.get(fault.cause, 0.0), told
    assert not outcome.left, told
    last = outcome.err.splitlines()[-1]
    if (fault.cause, fault.phase) == ("typed", "load"):
        assert outcome.err == f"error: {said}\n", told  # loading is agreed on: all ranks raise it, as one
        return
    culprit = f"rank {fault.rank}"
    assert last.startswith(f"error: {culprit} ") and said in last and outcome.err.count(culprit) == 1, told
    has_traceback = "Traceback" in outcome.err
    assert has_traceback == (fault.cause in ("raise", "memory")), told
    if not has_traceback and fault.cause != "kill":  # what that rank's libraries had said is told too
        assert outcome.err.count("\n") == 1, told


def test_a_rank_that_dies_or_stops_ends_the_run(tmp_path: Path) -> None:
    """Two in `make test`; all causes in all phases in the long tests."""
    faults = [Fault("stop", "decode"), Fault("kill", "backward", "gloo")]
    for fault, outcome in zip(faults, outcomes(faults, tmp_path), strict=True):
        check(fault, outcome)


PHASES = ("start", "load", "prefill", "decode", "forward", "backward", "save")
INSIDE = ("decode collective", "training collective")
ALL = {
    "shared memory": [
        Fault(cause, phase) for cause in ENDING for phase in (*PHASES, *INSIDE) if (cause, phase) != ("absent", "load")
    ],
    "gloo": [
        Fault(cause, phase, "gloo")
        for cause in ("raise", "kill", "stop", "absent")
        for phase in ("prefill", "decode", "forward", "backward", "save", *INSIDE)
    ],
    "data parallel": [
        Fault(cause, phase, "data parallel")
        for cause in ("raise", "kill", "stop", "absent")
        for phase in ("forward", "backward")
    ]
    + [Fault(cause, "save", "data parallel", rank=0) for cause in ("raise", "kill", "stop")],
}
"""A rank that is away while it loads, or while it saves for all replicas, is at work."""


@pytest.mark.long
@pytest.mark.parametrize("cause", ENDING)
@pytest.mark.parametrize("communicator", ALL)
def test_every_cause_in_every_phase(communicator: str, cause: str, tmp_path: Path) -> None:
    faults = [fault for fault in ALL[communicator] if fault.cause == cause]
    if not faults:
        return
    found = outcomes(faults, tmp_path)
    print(*(f"{outcome.seconds:.1f} s: {fault}" for fault, outcome in zip(faults, found, strict=True)), sep="\n")
    for fault, outcome in zip(faults, found, strict=True):
        check(fault, outcome)


@pytest.mark.parametrize(
    "how, phase",
    [
        (signal.SIGKILL, "start"),
        pytest.param(signal.SIGINT, "load", marks=pytest.mark.long),
        *(
            pytest.param(how, phase, marks=pytest.mark.long)
            for how in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
            for phase in ("decode", "backward")
        ),
    ],
)
def test_nothing_is_left_of_a_run_whose_launcher_is_ended(how: signal.Signals, phase: str, tmp_path: Path) -> None:
    """One rank sleeps, the other waits for it. Ranks that train take SIGTERM for a request: it is sent twice."""
    run = Run(Fault("absent", phase), tmp_path)
    run.wait_for_start()
    run.wait_for_failure()
    if (how, phase) == (signal.SIGTERM, "backward"):
        run.process.send_signal(how)
        time.sleep(1.5)
    began = time.time()
    run.process.send_signal(how)
    outcome = run.outcome(began)
    assert outcome.seconds < ENDS_WITHIN_S and not outcome.left, outcome
    assert outcome.status == (-how if how == signal.SIGKILL else 128 + how) and outcome.err == ""


@pytest.mark.long
@pytest.mark.parametrize("cause", ENDING)
def test_torchrun_ends_too_and_our_ranks_say_why(cause: str, tmp_path: Path) -> None:
    """It gives ranks that do not hear SIGTERM half a minute, and looks for no heartbeat."""
    noticed_s, torchruns_grace_s = {"stop": (60.0, 30.0), "absent": (TIMEOUT_S, 30.0)}.get(cause, (0.0, 0.0))
    outcome = Run(Fault(cause, "decode"), tmp_path, TORCHRUN).outcome()
    assert outcome.status != 0 and not outcome.left, outcome
    assert outcome.seconds < ENDS_WITHIN_S + noticed_s + torchruns_grace_s, outcome
    said = {"stop": "did not enter", "absent": "did not enter", "kill": "Signal 9 (SIGKILL)"}
    assert said.get(cause, ENDING[cause][1]) in outcome.err, outcome


@pytest.mark.long
def test_ranks_go_with_torchrun(tmp_path: Path) -> None:
    """What ranks have started themselves stays, with torchrun."""
    run = Run(Fault("absent", "decode"), tmp_path, TORCHRUN)
    run.wait_for_failure()
    run.process.kill()
    outcome = run.outcome(time.time(), patience_s=5.0)
    assert not outcome.left, outcome


# The parts


def processes(*commands: list[str]) -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen(command, start_new_session=True) for command in commands]


SLEEPS, COMPUTES = ["sleep", "60"], ["sh", "-c", "while :; do :; done"]


@pytest.mark.parametrize(
    "command, beats, stopped, ends",
    [
        (SLEEPS, "never", True, True),
        (SLEEPS, "never", False, False),  # an interpreter that starts
        (SLEEPS, "once", False, True),  # a call that holds the interpreter
        (SLEEPS, "always", False, False),
        (COMPUTES, "once", False, False),
        (COMPUTES, "once", True, True),
    ],
)
def test_a_rank_that_shows_no_sign_of_life_is_ended(
    command: list[str], beats: str, stopped: bool, ends: bool, tmp_path: Path
) -> None:
    (process,) = processes(command)
    beat = (tmp_path / heartbeat.NAME).touch
    if beats != "never":
        beat()
    if stopped:
        process.send_signal(signal.SIGSTOP)
    watch = RankWatch(5, process.pid, tmp_path / "error.json")
    try:
        for _ in range(3 * int(SILENCE_S / POLL_S) // 2):
            time.sleep(0.03)
            if beats == "always":
                beat()
            if not watch.look():
                break
        status = process.wait(5) if ends else process.poll()
    finally:
        process.kill()
        process.wait()
    assert status == (-signal.SIGKILL if ends else None)
    assert (tmp_path / "error.json").exists() == ends
    if ends:
        assert json.loads((tmp_path / "error.json").read_text())[failures.ENTRY]["rank"] == 5


@pytest.mark.parametrize("state, excused", [("R", True), ("D", True), ("t", True), ("S", False), ("T", False)])
def test_who_waits_for_the_machine_or_a_debugger_is_excused(state: str, excused: bool) -> None:
    assert Signs(state, processor_time=7, started="1", last_beat=2).is_excused == excused


@pytest.mark.parametrize("same_start", [False, True])
def test_a_process_that_has_the_number_of_a_rank_that_ended_is_left_alone(same_start: bool, tmp_path: Path) -> None:
    """By the time of its start; where that is the same, by what the launcher holds on to."""
    (ended,) = processes(SLEEPS)
    watch = RankWatch(0, ended.pid, tmp_path / "error.json")
    ended.kill()
    ended.wait()
    time.sleep(0.05)  # a start is told in hundredths of a second
    (other,) = processes(SLEEPS)
    other.send_signal(signal.SIGSTOP)
    watch._process_id = other.pid
    if same_start:
        signs = watch._signs()
        watch._started = signs.started if signs else ""
    looks = 0
    while watch.look():
        looks += 1
    time.sleep(0.1)
    assert other.poll() is None
    assert (looks > 0) == same_start == (tmp_path / "error.json").exists()
    other.kill()
    other.wait()


@pytest.mark.parametrize("over", [False, True])
def test_watching_ends_with_the_rank_or_with_the_run(over: bool, tmp_path: Path) -> None:
    (process,) = processes(SLEEPS)
    watch, event = RankWatch(0, process.pid, tmp_path / "error.json"), threading.Event()
    watching = threading.Thread(target=heartbeat._watch, args=([watch], event), daemon=True)
    watching.start()
    if over:
        event.set()
    else:
        process.kill()
    watching.join(4 * POLL_S)
    assert not watching.is_alive() and (process.poll() is None) == over
    with pytest.raises(OSError):
        os.fstat(watch._process)
    process.kill()
    process.wait()


def test_what_stops_all_processes_accuses_no_rank(tmp_path: Path) -> None:
    """The launcher too: it does not look while it is stopped, however long that is."""
    (process,) = processes(SLEEPS)
    process.send_signal(signal.SIGSTOP)
    watch = RankWatch(0, process.pid, tmp_path / "error.json")
    for _ in range(int(SILENCE_S / POLL_S)):
        watch.look()
    process.send_signal(signal.SIGCONT)
    time.sleep(0.1)
    watch.look()
    assert process.poll() is None
    process.kill()
    process.wait()


def test_a_rank_beats_as_long_as_its_interpreter_runs(tmp_path: Path) -> None:
    heartbeat.begin(tmp_path / "error.json")
    first = (tmp_path / heartbeat.NAME).stat().st_mtime_ns
    time.sleep(heartbeat.BEAT_S + 0.5)
    assert (tmp_path / heartbeat.NAME).stat().st_mtime_ns > first


def test_the_guard_ends_what_is_left_and_removes_the_directory(tmp_path: Path) -> None:
    left, forgotten, released = processes(SLEEPS, SLEEPS, SLEEPS)
    directory = tmp_path / "of the run"
    for guarded in (left, released):
        directory.mkdir()
        (directory / "file").touch()
        with ProcessGuard(directory) as guard:
            guard.add([guarded.pid, forgotten.pid])
            guard.forget([forgotten.pid])
            if guarded is released:
                guard.release()
        assert not directory.exists()
    assert left.wait(5) == -signal.SIGKILL
    for kept in (forgotten, released):
        assert kept.poll() is None
        kept.kill()
        kept.wait()


def test_a_tree_leaves_a_process_alone_that_got_its_roots_number(monkeypatch: pytest.MonkeyPatch) -> None:
    (other,) = processes(SLEEPS)
    with monkeypatch.context() as patch:
        patch.setattr(process_tree, "_start_of", lambda process_id: "7")
        tree = ProcessTree(other.pid)
    for _ in range(2):
        tree.end()
        assert tree.members() == () and other.poll() is None
    other.kill()
    other.wait()


def test_the_guard_ends_what_a_rank_that_has_gone_had_started() -> None:
    rank = subprocess.Popen(["sh", "-c", "sleep 60 &"], stdout=subprocess.PIPE, start_new_session=True)
    assert rank.stdout is not None
    with ProcessGuard() as guard:
        guard.add([rank.pid])
        rank.wait()
        assert not select.select([rank.stdout], [], [], 0.1)[0], "what it started has gone too: this tests nothing"
    assert select.select([rank.stdout], [], [], 5.0)[0] and rank.stdout.read() == b""
    rank.stdout.close()


def test_the_guard_ends_what_carries_its_mark_and_nothing_else(tmp_path: Path) -> None:
    directory = tmp_path / "of the run"
    marks = [{MARK: str(directory)}, {MARK: f"{directory}2"}, {"OTHER": str(directory)}]
    directory.mkdir()
    with ProcessGuard(directory):
        carries, *others = (subprocess.Popen(SLEEPS, env=os.environ | mark) for mark in marks)
    assert carries.wait(5) == -signal.SIGKILL
    for other in others:
        assert other.poll() is None
        other.kill()
        other.wait()


DAEMON = """\
import os, subprocess, sys, time
from pathlib import Path

daemon = subprocess.Popen(["sh", "-c", "setsid sleep 60 & echo $!"], stdout=subprocess.PIPE, text=True)
Path(sys.argv[1], os.environ["RANK"]).write_text(daemon.stdout.readline())
while len(os.listdir(sys.argv[1])) < 2:
    time.sleep(0.02)
if sys.argv[2] == "fails":
    raise SystemExit(3)
if sys.argv[2] == "waits":
    time.sleep(60)
"""
"""Each rank leaves a child in a session of its own, whose parent has gone."""


@pytest.mark.parametrize("how", ["fails", "waits", "ends"])
def test_daemons_that_ranks_started_end_with_a_run_that_fails(how: str, tmp_path: Path) -> None:
    """When a rank fails, or the launcher is killed; what ranks that ended well have started is theirs."""
    (tmp_path / "script.py").write_text(DAEMON)
    notes = tmp_path / "notes"
    notes.mkdir()
    command = [*LAUNCH, "run", "--nproc", "2", str(tmp_path / "script.py"), str(notes), how]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (all((notes / rank).exists() and (notes / rank).read_text() for rank in "01")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    daemons = [int((notes / rank).read_text()) for rank in "01"]
    if how == "waits":
        run.kill()
    status = run.wait(60)
    deadline = time.monotonic() + (1.0 if how == "ends" else ENDS_WITHIN_S)
    while any(map(is_running, daemons)) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = [daemon for daemon in daemons if is_running(daemon)]
    for daemon in left:
        os.kill(daemon, signal.SIGKILL)
    assert (status == 0) == (how == "ends")
    assert left == (daemons if how == "ends" else [])


def test_the_one_rank_that_did_not_come_is_blamed() -> None:
    waited = Failure.of(0, RuntimeError("[gloo/transport/tcp/buffer.cc:72] Timed out waiting 5000ms for recv"))
    told = failures.blamed_on(waited, {1}).story(2, together=False, debug=False)
    assert told.startswith("error: rank 1 of 2: did not come to a collective of the others: ")
    named = Failure.of(0, LostPeerError("rank 3 (process 7) ended during all_reduce"))
    assert failures.blamed_on(named, {1}) is named
    assert named.story(4, together=False, debug=False) == "error: rank 3 (process 7) ended during all_reduce\n"
    for absent in (set(), {1, 2}):
        assert failures.blamed_on(waited, absent) is waited
    assert failures.blamed_on(Failure.of(0, ValueError("x")), {1}).rank == 0


@pytest.mark.parametrize("ranks_here, blamed", [(2, 1), (3, 0)])
def test_one_that_did_not_come_is_blamed_only_where_all_others_have_failed(
    ranks_here: int, blamed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of three ranks, the third has ended well: it may be that one that the first has lost."""
    waited = Failure.of(0, RuntimeError("[gloo/transport/tcp/buffer.cc:72] Timed out waiting 5000ms for recv"))
    launched_ranks._tell([waited], {1}, Placement(ranks_here), tmp_path, debug=False)
    assert capsys.readouterr().err.startswith(f"error: rank {blamed} of {ranks_here}: ")


def _timeouts_of_groups(world: TensorParallelGroup) -> list[float]:
    groups = TrainingGroups.of(world, 2)
    made = (world, groups.data, groups.tensor, groups.control)
    return [timeout_of(group.process_group).total_seconds() for group in made]


def test_groups_within_a_training_run_wait_as_long_as_the_run_says(ranks: RankPool) -> None:
    """torch would give them half an hour."""
    for world, *others in ranks(4).run(_timeouts_of_groups):
        assert others == [world] * 3 and world < 1800.0
