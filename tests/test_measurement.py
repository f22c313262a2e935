"""Measuring: turns, spreads, contestants that misbehave in every way, and nobody left behind."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import collectives, decode
from launch.arguments import Parser
from launch.measurement import decoding
from launch.measurement.cases import Case
from launch.measurement.child import Child, Command
from launch.measurement.command_line import add_shared_options, reporting_errors
from launch.measurement.contestants import Contestant, Field
from launch.measurement.decoding import Comparison, compare
from launch.measurement.errors import ContestantError
from launch.measurement.interleaving import WARM_UP, interleave
from launch.measurement.lineup import lineup
from launch.measurement.model_facts import ModelFacts, model_facts
from launch.measurement.peers.environments import interpreter
from launch.measurement.peers.llama_cpp import gguf_of
from launch.measurement.peers.task import Task
from launch.measurement.peers.vllm import cores_of_workers
from launch.measurement.read_bandwidth import ReadBandwidth
from launch.measurement.reader import PIECE_BYTES
from launch.measurement.requests import DecodeAnswer, DecodeRequest, random_request
from launch.measurement.rows import Served, row, same_ids
from launch.measurement.serving import TokenClock
from launch.measurement.spread import Spread, middle_mean, paired_ratio
from launch.measurement.starting import seconds_to_first_token
from launch.measurement.tables import comparison_fields, print_comparison
from launch.process_guard import ProcessGuard
from launch.process_tree import ProcessTree
from tp.errors import RequestError

ROOT = Path(__file__).resolve().parents[1]
EMBEDDED = str(ROOT / "launch" / "embedded_model")
REQUEST = DecodeRequest(((1, 2), (3, 4)), 3)
ANSWERS = """
import json, os, sys, time
print(json.dumps({"ready": {"pid": os.getpid()}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    ids = [[7] * asked["new_tokens"] for _ in asked["prompt_ids"]]
    answer = {"ttft_ms": 2.0, "tpot_ms": 1.0, "step_ms": 1.0, "tokens_per_s": 1000.0 * len(ids), "new_ids": ids}
    print(json.dumps({"answer": answer}), flush=True)
"""
"""A contestant that behaves."""
DIES = ANSWERS.replace("asked =", "sys.exit('out of luck') #")
HANGS = ANSWERS.replace("asked =", "time.sleep(60) #")
PRINTS_JUNK = ANSWERS.replace("    print(", "    print('INFO 42', flush=True); print('[1]'); print('{}')\n    print(")
ONLY_JUNK = "while True:\n    print('INFO all is well', flush=True); import time; time.sleep(0.01)"
MAKES_NO_SENSE = ANSWERS.replace('"new_ids"', '"old_ids"')
STOPS_EARLY = ANSWERS.replace("[7] * asked", "[7] * 2 or [7] * asked")
SAYS_WHY = "import json, time; print(json.dumps({'failed': 'no such instruction'}), flush=True); time.sleep(60)"
HAS_A_RANK = (
    """
import subprocess
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
""".join(ANSWERS.split("import json, os, sys, time\n", 1))
    .replace("import subprocess", "import json, os, sys, time, subprocess", 1)
    .replace('"pid": os.getpid()', '"pid": os.getpid(), "rank": rank.pid')
)
"""It starts another process in a session of its own, as launchers start ranks."""


def contestant(script, system="fake", processes=1):
    return Contestant(system, processes, 1, lambda: Command([sys.executable, "-c", script]))


def state(pid):
    """R, S, T ... as in ps; "" for a process that is gone or only waits to be collected."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""
    return "" if letter in "ZX" else letter


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


@pytest.fixture
def field():
    with Field() as entered:
        yield entered


@pytest.fixture
def guard():
    with ProcessGuard() as entered:
        yield entered


def test_a_spread_has_the_quartiles_between_values():
    spread = Spread.of([4.0, 1.0, 2.0, 3.0])
    assert spread == Spread(2.5, 1.0, 1.75, 3.25, 4.0, 4)
    assert Spread.of([5.0]) == Spread(5.0, 5.0, 5.0, 5.0, 5.0, 1)


def test_the_middle_mean_leaves_out_a_quarter_at_each_end():
    assert middle_mean([90.0, 2.0, 1.0, 4.0]) == 3.0
    assert middle_mean([9.0, 2.0, 4.0]) == 5.0
    assert middle_mean([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 20.0]) == 3.5


def test_a_ratio_is_paired_by_round():
    """The second round was slow for both: the ratio of medians would be 3."""
    assert paired_ratio([2.0, 30.0, 6.0], [1.0, 15.0, 2.0]) == 2.0
    with pytest.raises(ValueError):
        paired_ratio([1.0], [1.0, 2.0])
    for nothing in (lambda: Spread.of([]), lambda: middle_mean([]), lambda: paired_ratio([], [])):
        with pytest.raises(ValueError):
            nothing()


def test_turns_rotate_and_warm_ups_do_not_count():
    order, told = [], []

    def action(name):
        order.append(name)
        return len(order)

    actions = {name: lambda name=name: action(name) for name in "abc"}
    outcome = interleave(actions, rounds=2, warm_ups=1, watch=told.append)
    assert "".join(order) == "abcbcacab"
    assert outcome.results == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}
    assert [turn.round for turn in told] == [WARM_UP] * 3 + [1] * 3 + [2] * 3


def test_who_fails_in_a_round_is_out_and_the_others_go_on():
    turns = iter([1.0, 2.0])

    def fails_in_the_third_turn():
        for turn in turns:
            return turn
        raise ContestantError("tired")

    outcome = interleave({"bad": fails_in_the_third_turn, "good": lambda: 5.0}, rounds=3, warm_ups=1)
    assert outcome.results == {"good": [5.0, 5.0, 5.0]}
    assert outcome.failures == {"bad": "tired"}


def test_any_other_error_ends_the_rounds():
    with pytest.raises(ZeroDivisionError):
        interleave({"broken": lambda: 1 / 0}, rounds=1)


def test_a_clock_counts_from_when_every_sequence_has_begun():
    """Sequence 0 gets two tokens before sequence 1 gets its first, at 1.5 s; then three tokens come in a second."""
    times = iter([0.0, 0.5, 1.0, 1.5, 2.0, 2.0, 2.5])
    clock = TokenClock(2, now=lambda: next(times))
    for index in (0, 0, 1, 0, 1, 1):
        clock.token(index)
    answer = clock.answer([[1, 2, 3], [4, 5, 6]])
    assert answer == DecodeAnswer(1500.0, pytest.approx(2000 / 3), 500.0, pytest.approx(3.0), ((1, 2, 3), (4, 5, 6)))


def test_one_token_has_no_time_between_tokens():
    clock = TokenClock(2, now=iter([0.0, 0.25]).__next__)
    clock.tokens()
    assert clock.answer([[1], [2]]) == DecodeAnswer(250.0, 0.0, 0.0, 0.0, ((1,), (2,)))


def test_requests_and_answers_survive_json():
    assert DecodeRequest.of_line(REQUEST.line()) == REQUEST
    answer = DecodeAnswer(1.5, 2.5, 2.25, 3.5, ((1, 2), (3, 4)))
    assert DecodeAnswer.of_fields(json.loads(json.dumps(answer.fields()))) == answer
    drawn = random_request(2, 5, 3, vocab_size=10)
    assert drawn == random_request(2, 5, 3, vocab_size=10)
    assert [len(ids) for ids in drawn.prompt_ids] == [5, 5] and max(map(max, drawn.prompt_ids)) < 10
    assert drawn.prompt_ids[0] != drawn.prompt_ids[1]


@pytest.mark.parametrize("script", [ANSWERS, PRINTS_JUNK], ids=["clean", "with junk between"])
def test_a_contestant_answers(field, script):
    field.load([contestant(script)], lambda line: None)
    for _ in range(2):
        answer = field.decode("fake tp=1", REQUEST, 10.0)
        assert answer == DecodeAnswer(2.0, 1.0, 1.0, 2000.0, ((7, 7, 7), (7, 7, 7)))
    assert not field.failures


@pytest.mark.parametrize(
    "script, reason",
    [
        (DIES, "it ended with status 1: out of luck"),
        (HANGS, "it gave no answer within 0.3 s"),
        (MAKES_NO_SENSE, r"its answer makes no sense: KeyError\('new_ids'\)"),
        (STOPS_EARLY, r"it made \[2, 2\] tokens; 3 were asked for in each of 2 sequences"),
    ],
)
def test_a_contestant_that_fails_while_it_is_asked_is_ended_and_named(field, script, reason):
    field.load([contestant(script, "bad"), contestant(ANSWERS)], lambda line: None)
    pid = field.facts["bad tp=1"]["pid"]
    with pytest.raises(ContestantError, match=f"^{reason}$"):
        field.decode("bad tp=1", REQUEST, 10.0 if script != HANGS else 0.3)
    assert list(field.failures) == ["bad tp=1"]
    assert state(pid) == ""
    field.decode("fake tp=1", REQUEST, 10.0)


@pytest.mark.parametrize(
    "script, reason",
    [
        ("import sys; sys.exit('no module named peer')", "it ended with status 1: no module named peer"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "it ended with status -4"),
        (ONLY_JUNK, "it gave no answer within 0.4 s"),
        (SAYS_WHY, "no such instruction"),
        ("print('{\"ready\": 1}')", "it said that it is ready in words that make no sense: 1"),
    ],
)
def test_a_contestant_that_does_not_start_is_a_failure_with_its_reason(field, script, reason):
    patience = 0.4 if script == ONLY_JUNK else 10.0
    field.load([contestant(script, "bad"), contestant(ANSWERS)], lambda line: None, timeout_s=patience)
    assert field.failures["bad tp=1"] == reason


def test_a_program_that_is_not_there_is_a_failure(field):
    absent = Contestant("absent", 1, 1, lambda: Command(["/nowhere/python"]))
    field.load([absent], lambda line: None)
    assert field.failures == {"absent tp=1": "/nowhere/python cannot be started: No such file or directory"}


def test_only_the_one_that_is_asked_is_awake_ranks_included(field):
    field.load([contestant(HAS_A_RANK), contestant(HANGS, "slow")], lambda line: None)
    ranks = [field.facts["fake tp=1"][who] for who in ("pid", "rank")]
    slow = field.facts["slow tp=1"]["pid"]
    wait_for(lambda: [state(pid) for pid in [*ranks, slow]] == ["T"] * 3)
    field.decode("fake tp=1", REQUEST, 10.0)
    with pytest.raises(ContestantError):
        field.decode("slow tp=1", REQUEST, 0.2)
    wait_for(lambda: [state(pid) for pid in ranks] == ["T"] * 2)


def test_leaving_by_an_error_ends_everyone():
    pids = []

    def interrupted():
        with Field() as field:
            field.load([contestant(HAS_A_RANK)], lambda line: None)
            pids.extend(field.facts["fake tp=1"][who] for who in ("pid", "rank"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    wait_for(lambda: [state(pid) for pid in pids] == ["", ""])


def test_ranks_end_even_when_their_launcher_has_gone_before(field):
    script = HAS_A_RANK.replace("asked =", "sys.exit('crashed') #")
    field.load([contestant(script)], lambda line: None)
    rank = field.facts["fake tp=1"]["rank"]
    began = time.monotonic()
    with pytest.raises(ContestantError, match="crashed"):
        field.decode("fake tp=1", REQUEST, 30.0)
    assert time.monotonic() - began < 15.0  # the rank holds its launcher's output open
    wait_for(lambda: state(rank) == "")


def test_nobody_is_left_behind_by_a_measuring_process_that_is_killed(tmp_path):
    """It gets no chance to clean up; the children are stopped and could not notice by themselves."""
    program = tmp_path / "measure.py"
    program.write_text(
        textwrap.dedent(f"""
        import os, signal, sys
        from launch.measurement.child import Command
        from launch.measurement.contestants import Contestant, Field
        with Field() as field:
            one = Contestant("fake", 1, 1, lambda: Command([sys.executable, "-c", {HAS_A_RANK!r}]))
            field.load([one], lambda line: None)
            print(field.facts["fake tp=1"]["pid"], field.facts["fake tp=1"]["rank"], flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, str(program)], stdout=subprocess.PIPE, env=environment, timeout=60)
    assert run.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in run.stdout.split()]
    assert len(pids) == 2
    wait_for(lambda: [state(pid) for pid in pids] == ["", ""])


def test_a_tree_knows_its_members_after_their_parent_has_gone():
    script = (
        "import subprocess, sys; p = subprocess.Popen(['sleep', '60'], stdout=2); print(p.pid, flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin and process.stdout
    grandchild = int(process.stdout.readline())
    tree = ProcessTree(process.pid)
    assert tree.members() == (process.pid, grandchild)
    process.communicate(b"\n")
    assert tree.members() == (grandchild,)
    tree.end()
    wait_for(lambda: state(grandchild) == "")


def test_start_to_first_token_is_a_second_start_and_ends_both(guard):
    found = []
    original = Child.wait_until_ready

    def remember(self, timeout_s):
        found.append(original(self, timeout_s)["pid"])
        return {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Child, "wait_until_ready", remember)
        seconds = seconds_to_first_token(contestant(ANSWERS), REQUEST, guard, 10.0)
    assert 0.0 < seconds < 10.0
    assert len(found) == 2
    assert [state(pid) for pid in found] == ["", ""]


def test_readers_read_at_the_same_time_and_end():
    with ReadBandwidth(2, 1, buffer_bytes=2 * PIECE_BYTES) as reader:
        assert 1e8 < reader.bytes_per_second(0.02) < 1e13
        pids = [pid for child in reader._children for pid in child.members()]
        assert len(pids) == 2
    assert [state(pid) for pid in pids] == ["", ""]


def served(*times, ids=((7, 7, 7),), reads=(1e9, 1e9)):
    answers = [DecodeAnswer(10 * time, time, time, 1e3 / time, ids) for time in times]
    return [Served(answer, read) for answer, read in zip(answers, reads, strict=False)]


def test_a_row_is_worked_out_from_the_same_turns():
    """988 MB in 40 ms are 24.7 GB/s; of 49.4 GB/s they are a half, in a quiet turn as in a slow one."""
    case = Case("decode", 1, 64, 3)
    found = row(
        case,
        Contestant("peer", 2, 1, lambda: Command([])),
        {"own tp=2": served(20.0, 40.0), "peer tp=2": served(40.0, 80.0, ids=((7, 8, 7),), reads=(49.4e9, 24.7e9))},
        ModelFacts(1000, 988_000_000),
    )
    assert found.milliseconds == Spread.of([40.0, 80.0])
    assert found.own_speed == {"own tp=2": 2.0}
    assert found.same_ids == {"own tp=2": pytest.approx(1 / 3)}
    assert found.weights_gb_per_s.maximum == pytest.approx(24.7)
    assert found.read_share.minimum == found.read_share.maximum == pytest.approx(0.5)


def test_prefill_counts_prompt_tokens_and_reads_no_weights_a_token():
    case = Case("prefill", 1, 64, 1)
    mine = Contestant("own", 1, 2, lambda: Command([]))
    found = row(case, mine, {"own tp=1": served(3.2)}, ModelFacts(1000, 1))
    assert found.milliseconds.median == 32.0
    assert found.tokens_per_s.median == pytest.approx(2000.0)
    assert (found.weights_gb_per_s, found.read_share) == (None, None)


def test_ids_count_as_the_same_up_to_the_first_that_is_not():
    one, other = served(1.0, ids=((1, 2, 3), (4, 5, 6)))[0], served(1.0, ids=((1, 0, 3), (4, 5, 6)))[0]
    assert same_ids(one.answer, other.answer) == pytest.approx(4 / 6)


class SmallReader(ReadBandwidth):
    def __init__(self, processes, threads):
        super().__init__(processes, threads, buffer_bytes=2 * PIECE_BYTES)


def test_a_comparison_lists_failures_beside_rows(monkeypatch):
    monkeypatch.setattr(decoding, "ReadBandwidth", SmallReader)
    told = []
    contestants = [contestant(ANSWERS, "own"), contestant(ANSWERS, "peer"), contestant(DIES, "bad")]
    cases = [Case("prefill", 1, 8, 1), Case("decode", 2, 8, 3)]
    found = compare(contestants, cases, ModelFacts(100, 10**6), rounds=2, timeout_s=10.0, watch=told.append)
    assert [(row.phase, row.contestant) for row in found.rows] == [
        (phase, name) for phase in ("prefill", "decode") for name in ("own tp=1", "peer tp=1")
    ]
    assert found.failures == {"bad tp=1": "it ended with status 1: out of luck"}
    assert any("decode, batch 2, 8 prompt tokens: round 2 of 2: peer tp=1: 1.0 ms a token" in line for line in told)


def test_reads_are_directly_before_and_after_a_turn(monkeypatch):
    events, rates = [], iter([1e9, 3e9])

    class Recorder(SmallReader):
        def bytes_per_second(self, seconds=0.3):
            events.append(self.name)
            return next(rates)

    def decode(field, name, request, timeout_s):
        events.append(name)
        return served(1.0)[0].answer

    monkeypatch.setattr(decoding, "ReadBandwidth", Recorder)
    monkeypatch.setattr(decoding, "interleave", partial(interleave, warm_ups=0))
    monkeypatch.setattr(Field, "decode", decode)
    found = compare(
        [contestant(ANSWERS)],
        [Case("decode", 1, 8, 3)],
        ModelFacts(100, 10**6),
        rounds=1,
        timeout_s=10.0,
        watch=lambda line: None,
    )
    assert events == ["memory read, 1 x 1", "fake tp=1", "memory read, 1 x 1"]
    assert found.rows[0].read_gb_per_s.median == 2.0


def test_the_table_and_the_json_say_the_same(monkeypatch):
    from rich.console import Console

    made = Contestant("peer", 2, 1, lambda: Command([]))
    turns = {"own tp=2": served(20.0), "peer tp=2": served(40.0, reads=[49.4e9])}
    found = row(Case("decode", 1, 64, 3), made, turns, ModelFacts(1000, 988_000_000))
    comparison = Comparison((found,), {"vllm tp=2": "RuntimeError: [no] such instruction"})
    console = Console(file=io.StringIO(), width=140)
    print_comparison(console, comparison)
    shown = console.file.getvalue()
    for text in ("peer tp=2 (2 x 1)", "40.0 (40.0 to 40.0)", "24.7", "50% of 49.4", "2.00x"):
        assert text in shown
    assert "failed: vllm tp=2: RuntimeError: [no] such instruction" in shown
    fields = json.loads(json.dumps(comparison_fields(comparison)))
    assert fields["rows"][0]["own_speed"] == {"own tp=2": 2.0}
    assert fields["failures"] == [{"contestant": "vllm tp=2", "reason": "RuntimeError: [no] such instruction"}]


def test_cores_are_dealt_as_vllm_takes_them():
    assert cores_of_workers([0, 1], 1, 2) == "0-1"
    assert cores_of_workers([0, 1], 2, 1) == "0|1"
    assert cores_of_workers([0, 2, 4, 5], 2, 2) == "0,2|4-5"
    with pytest.raises(ContestantError, match="3 workers with 1 threads need more than the 2 cores"):
        cores_of_workers([0, 1], 3, 1)


def test_an_environment_that_is_not_there_is_a_failure_with_its_reason(tmp_path):
    with pytest.raises(ContestantError, match="make peers makes it"):
        interpreter("vllm", tmp_path)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / ".installed").touch()
    assert interpreter("vllm", tmp_path) == str(tmp_path / "vllm" / "bin" / "python")
    (tmp_path / "vllm.failed").write_text("no wheel for this machine\n")
    with pytest.raises(ContestantError, match="could not install it: no wheel for this machine$"):
        interpreter("vllm", tmp_path)


def test_the_gguf_file_lies_beside_the_directory(tmp_path):
    directory, beside, other = tmp_path / "model-0.5b", tmp_path / "model-0.5b.gguf", tmp_path / "other.gguf"
    directory.mkdir()
    with pytest.raises(ContestantError, match="--gguf"):
        gguf_of(Task(str(directory), "bfloat16", 1, 8))
    beside.touch()
    other.touch()
    assert gguf_of(Task(str(directory), "bfloat16", 1, 8)) == str(beside)
    assert gguf_of(Task(f"{directory}/", "bfloat16", 1, 8)) == str(beside)
    assert gguf_of(Task(str(directory), "bfloat16", 1, 8, gguf=str(other))) == str(other)
    with pytest.raises(ContestantError, match="--gguf /nowhere.gguf is no .gguf file"):  # not the one beside instead
        gguf_of(Task(str(directory), "bfloat16", 1, 8, gguf="/nowhere.gguf"))


@pytest.mark.parametrize("text", ["nan", "inf", "0", "-1"])
def test_patience_is_a_time_that_ends(text):
    parser = Parser()
    add_shared_options(parser, tp="1")
    assert parser.parse_args(["--model", "m", "--patience", "2.5"]).patience == 2.5
    with pytest.raises(RequestError, match="--patience: .* is not a number of seconds above 0"):
        parser.parse_args(["--model", "m", f"--patience={text}"])


def test_a_file_that_could_not_be_written_is_refused_before_anything_is_measured(tmp_path):
    parser = Parser()
    add_shared_options(parser, tp="1")
    for there in ("-", tmp_path / "new.json"):
        assert parser.parse_args(["--model", "m", "--json", str(there)]).json == there
    assert not list(tmp_path.iterdir())
    for file, reason in ((tmp_path / "absent" / "a.json", "cannot be written"), (tmp_path, "is not a file")):
        with pytest.raises(RequestError, match=f"argument --json: the file {file} {reason}"):
            parser.parse_args(["--model", "m", "--json", str(file)])


def test_an_interruption_is_a_line(capsys):
    def interrupted():
        raise KeyboardInterrupt

    assert reporting_errors(interrupted) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "interrupted\n"


def test_the_lineup_deals_out_the_threads():
    task = Task("model", "bfloat16", 1, 8)
    found = lineup(task, [1, 2], ["llama_cpp", "vllm"], 2)
    assert [(c.name, c.processes, c.threads) for c in found] == [
        ("own tp=1", 1, 2),
        ("own tp=2", 2, 1),
        ("llama_cpp tp=1", 1, 2),
        ("vllm tp=1", 1, 2),
        ("vllm tp=2", 2, 1),
    ]
    with pytest.raises(RequestError, match="--compare sglang: there are transformers, vllm, llama_cpp"):
        lineup(task, [1], ["sglang"], 2)


def test_cases_of_the_command_line():
    arguments = decode.parser().parse_args("--model m --batch 1,8 --prompt-tokens 64 --prefill-tokens 512".split())
    assert decode.chosen_cases(arguments) == [
        Case("prefill", 1, 512, 1), Case("decode", 1, 64, 64), Case("decode", 8, 64, 64)
    ]  # fmt: skip


def test_a_single_token_is_no_decode():
    with pytest.raises(RequestError, match="--new-tokens 1 leaves no time between tokens: give at least 2"):
        decode.chosen_cases(decode.parser().parse_args("--model m --new-tokens 1".split()))


def test_bytes_of_a_step_are_those_of_all_weights_of_a_tied_model():
    facts = model_facts(EMBEDDED, "bfloat16")
    size = (ROOT / "launch" / "embedded_model" / "model.safetensors").stat().st_size
    assert facts.vocab_size == 1024
    assert size - 16384 < facts.step_bytes < size  # the file has a header


def _collectives(group):
    communicators = {collectives.OWN: group.communicator, collectives.GLOO: group.communicator}
    return [
        collectives.row(name, 1024, collectives.measure(communicators, name, 1024, torch.bfloat16, rounds=1))
        for name in collectives.OPERATIONS
    ]


def test_every_collective_is_timed(ranks):
    for rows in ranks(2).run(_collectives):
        assert [row["operation"] for row in rows] == list(collectives.OPERATIONS)
        for found in rows:
            assert found["microseconds"][collectives.OWN]["count"] == collectives.repeats_of(1024)
            assert found["gb_per_s"][collectives.GLOO] > 0 and found["own_speed"] > 0


@pytest.mark.long
def test_the_engine_itself_is_measured_at_two_degrees(tmp_path):
    """The whole command, on the small model in the tree: rank 0 reads requests, the other follows."""
    target = tmp_path / "rows.json"
    options = "--runs 1 --batch 2 --prompt-tokens 8 --new-tokens 3 --prefill-tokens 16 --patience 120".split()
    command = [sys.executable, "benchmarks/decode.py", "--model", EMBEDDED, "--json", str(target), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout) == (0, ""), run.stderr
    found = json.loads(target.read_text())
    assert found["failures"] == []
    assert [row["contestant"] for row in found["rows"]] == ["own tp=1", "own tp=2"] * 2
    assert found["rows"][-1]["same_ids"] == {"own tp=1": pytest.approx(1.0), "own tp=2": 1.0}
