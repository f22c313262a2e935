"""Rows of `bench`, worked out of made-up measurements, and how they are written, read, shown and drawn."""

from __future__ import annotations

import io
import json

import pytest

from launch.benching.charts import Bar, charts
from launch.benching.plots import data_of, draw
from launch.benching.recorder import Recorder
from launch.benching.results_file import ResultsFile, complete_cases, read_results
from launch.benching.rows import Measured, Row, Sample, rows_of
from launch.benching.sweep import Case, Form
from launch.benching.table import markdown, print_tables, speed_up_text, summary, tables
from launch.measurement.engine.requests import TrainingAnswer
from launch.measurement.requests import Communication, DecodeAnswer
from launch.measurement.spread import Spread
from tp.errors import RequestError

ALONE = Form("own", 1, 2, 2)
REPLICATE, SHARDED = (Form("own", 2, 1, 2, layout) for layout in ("replicate", "sharded"))
PEER = Form("vllm", 2, 1, 2)
DECODE = Case("strong", "decode", "bfloat16", 3, 64, 5)
PREFILL = Case("weak-batch", "prefill", "bfloat16", 3, 64, 1)
MACHINE = {"cpu": "a CPU", "cores": 2, "cpu_capability": "AVX2", "devices": [], "platform": "Linux"}
SETTINGS = {
    "date": "2026-01-02", "model": "m", "weights": "random", "threads": 2, "runs": 2, "warm_ups": 1,
    "machine": MACHINE, "packages": {"torch": "2.13"},
}  # fmt: skip


def communication(*milliseconds, calls=40, nbytes=4000):
    return Communication(calls, nbytes, tuple(each / 1e3 for each in milliseconds))


def decode_samples(*times, inside=None):
    return [Sample(time, inside and communication(*inside), DECODE.new_tokens - 1) for time in times]


def decode_rows():
    samples = {
        ALONE: decode_samples(10.0, 30.0),
        REPLICATE: decode_samples(20.0, 40.0, inside=(8.0, 4.0)),
        PEER: decode_samples(40.0, 60.0),
    }
    measured = Measured(samples, "memory", {1: [2e9, 4e9], 2: [4e9, 2e9]})
    return rows_of(DECODE, measured, dict.fromkeys(samples, 2e7), num_layers=5)


def prefill_rows(form=SHARDED):
    samples = {ALONE: [Sample(10.0, None)], form: [Sample(8.0, communication(2.0, 1.0))]}
    measured = Measured(samples, "matrix products", {})
    return rows_of(PREFILL, measured, {ALONE: 1e9, form: 2e9}, num_layers=4)


def test_a_speed_up_is_the_median_of_the_rounds_ratios():
    """A ratio of medians would be 20 / 30."""
    alone, ranks, peer = decode_rows()
    assert alone.speed_up == alone.efficiency == Spread.of([1.0, 1.0])
    assert ranks.speed_up == Spread.of([0.5, 0.75])
    assert ranks.efficiency == ranks.speed_up  # as many cores
    assert peer.speed_up == Spread.of([0.25, 0.5]) and peer.efficiency is None
    assert ranks.milliseconds == Spread.of([20.0, 40.0])
    assert ranks.tokens_per_s == Spread.of([150.0, 75.0])


def test_efficiency_is_the_speed_up_by_what_it_took():
    gpus = Form("own", 4, 1, 4, "replicate")
    samples = {Form("own", 1, 1, 1): [Sample(12.0, None)], gpus: [Sample(4.0, communication(1.0))]}
    row = rows_of(DECODE, Measured(samples, "memory", {}), dict.fromkeys(samples, 1.0), 1)[1]
    assert row.speed_up.median == 3.0 and row.efficiency.median == 0.75


def test_weak_scaling_counts_the_work_that_was_done():
    """Twice the work in 0.8 of the time: 2.5 times as fast."""
    alone, ranks = prefill_rows()
    assert (alone.batch, ranks.batch, ranks.tokens) == (3, 6, 64)
    assert ranks.speed_up.median == ranks.efficiency.median == 2.5
    assert ranks.tokens_per_s.median == pytest.approx(6 * 64 / 8e-3)


def test_collectives_are_of_one_step_and_of_one_layer():
    """40 calls in 4 decode steps of 5 layers; rank 1 spent half as long in them."""
    ranks = decode_rows()[1].collectives
    assert (ranks.calls, ranks.bytes) == (10.0, 1000.0)
    assert (ranks.calls_a_layer, ranks.bytes_a_layer) == (2.0, 200.0)
    assert ranks.milliseconds.median == pytest.approx(2.0) and ranks.least_milliseconds.median == pytest.approx(1.0)
    assert ranks.share.maximum == pytest.approx(0.1) and ranks.share.minimum == pytest.approx(0.05)
    assert decode_rows()[0].collectives is None


def test_a_share_is_of_what_was_read_in_the_same_round():
    """20 MB in 10 and 30 ms are 2 and 0.67 GB/s."""
    alone, ranks, _ = decode_rows()
    assert alone.limit.of == "memory" and alone.limit.rate == Spread.of([2e9, 4e9])
    assert (alone.limit.share.maximum, alone.limit.share.minimum) == pytest.approx((1.0, 1 / 6))
    assert ranks.limit.share == Spread.of([0.25, 0.25])
    assert prefill_rows()[0].limit is None


def test_without_t_1_there_is_no_speed_up():
    samples = {REPLICATE: decode_samples(20.0, inside=(1.0, 1.0))}
    (row,) = rows_of(DECODE, Measured(samples, "memory", {2: [1e9]}), {REPLICATE: 1.0}, 1)
    assert row.speed_up is None and row.efficiency is None
    assert tables([row])[0].rows[0][3:5] == ("", "")
    assert charts([row], "m").keys() == {"strong-time"}


def test_samples_are_what_the_case_is_about():
    inside, later = communication(1.0), communication(2.0)
    answer = DecodeAnswer(100.0, 10.0, 9.0, 300.0, ((1,),), inside, later)
    assert Sample.of(PREFILL, answer) == Sample(100.0, inside)
    assert Sample.of(DECODE, answer) == Sample(10.0, later, 4)
    assert Sample.of(DECODE, answer).communication_ms == (0.5,)
    train = Case("strong", "train", "float32", 1, 8, 0)
    assert Sample.of(train, TrainingAnswer(7.0, 4.6, inside)) == Sample(7.0, inside)
    fields = json.loads(json.dumps(TrainingAnswer(7.0, 4.6, inside).fields()))
    assert TrainingAnswer.of_fields(fields) == TrainingAnswer(7.0, 4.6, inside)
    assert DecodeAnswer.of_fields(json.loads(json.dumps(answer.fields()))) == answer


def test_a_speed_up_below_one_is_called_slower():
    shown = tables(decode_rows())[0]
    assert shown.title == "decode, bfloat16, batch 3, 64 + 5 tokens, strong scaling"
    slower = ["0.62x (0.56 to 0.69): slower than t = 1", "0.38x (0.31 to 0.44): slower than t = 1"]
    assert [row[3] for row in shown.rows] == ["1 (t = 1)", *slower]
    assert tables(prefill_rows())[0].rows[1][3] == "2.50x (2.50 to 2.50)"
    assert f"own tp=2 replicate 30.0 ms a token, {slower[0]}" in summary(decode_rows())


def test_what_the_rounds_disagree_about_is_not_called_slower():
    assert speed_up_text(Spread.of([0.7, 0.9, 1.1, 1.3, 0.8]), False) == "0.90x (0.80 to 1.10)"
    assert speed_up_text(Spread.of([0.7, 0.9, 0.99, 1.3, 0.8]), False) == "0.90x (0.80 to 0.99): slower than t = 1"
    assert speed_up_text(Spread.of([0.9, 0.9, 0.998]), False) == "0.90x (0.90 to 0.95): slower than t = 1"
    assert speed_up_text(Spread.of([0.9, 0.9, 0.998, 0.998]), False) == "0.95x (0.90 to 1.00)"


def test_the_cells_of_a_row():
    assert tables(decode_rows())[0].rows[1] == (
        "t = 2, replicate (2 x 1)", "30.0 (25.0 to 35.0; 20.0 to 40.0)", "112.5",
        "0.62x (0.56 to 0.69): slower than t = 1", "62%",
        "2.00 ms, 8%", "2.0, 200 B", "25% of 3.0 GB/s",
    )  # fmt: skip
    assert tables(decode_rows())[0].rows[2][0] == "vllm tp=2 (2 x 1)"
    assert tables(prefill_rows())[0].rows[1][0] == "t = 2, sharded (2 x 1), 6 of 64 tokens"


def test_terminal_and_markdown_have_the_same_cells_and_the_failures():
    from rich.console import Console

    rows, failures = [*decode_rows(), *prefill_rows()], ["vllm tp=1 (serving): [no] such instruction"]
    console = Console(file=io.StringIO(), width=200)
    print_tables(console, rows, failures)
    shown, page = console.file.getvalue(), markdown(SETTINGS, rows, failures)
    for table in tables(rows):
        assert table.title in shown and f"### {table.title}" in page
        for cells in table.rows:
            assert f"| {' | '.join(cells)} |" in page
            assert all(cell in shown for cell in cells)
    assert "failed: vllm tp=1 (serving): [no] such instruction" in shown and f"- failed: {failures[0]}" in page
    assert page.startswith(
        "m with random weights, 2 threads in all, on a CPU, 2 cores; torch 2.13. Medians of 2 rounds"
    )


def test_rows_survive_json():
    for row in (*decode_rows(), *prefill_rows()):
        assert Row.from_json(json.loads(json.dumps(row.to_json()))) == row


class Display:
    """Keeps what it is told."""

    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)


def test_rows_and_failures_are_in_the_file_as_soon_as_they_are_known(tmp_path):
    path = tmp_path / "rows.jsonl"
    recorder = Recorder(ResultsFile(path, SETTINGS, resumes=False), Display())
    recorder.rows(prefill_rows())
    settings, rows = read_results(path)
    assert settings == SETTINGS and rows == prefill_rows()
    for _ in range(2):  # told again, written once
        recorder.failures("serving", {"vllm tp=1": "no wheel"})
    recorder.rows(decode_rows())
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds == ["settings", *["row"] * 5, "failure"]
    assert recorder.failure_lines() == ["vllm tp=1 (serving): no wheel"]
    assert recorder.all_rows([DECODE, PREFILL]) == [*decode_rows(), *prefill_rows()]


def test_a_sweep_goes_on_where_it_was_interrupted(tmp_path):
    """A case half measured, and a line half written: both are done again; a case of another sweep stays."""
    path = tmp_path / "rows.jsonl"
    before = ResultsFile(path, SETTINGS, resumes=False)
    before.put(prefill_rows())
    before.put(decode_rows()[:2])
    with path.open("a") as out:
        out.write('{"kind": "row", "case": {"sca')
    expected = {PREFILL: [ALONE, SHARDED], DECODE: [ALONE, REPLICATE, PEER]}
    file = ResultsFile(path, {**SETTINGS, "date": "2026-01-03"}, resumes=True)
    assert complete_cases(file.rows, expected) == {PREFILL}
    assert read_results(path)[1] == file.rows == [*prefill_rows(), *decode_rows()[:2]], "until there are others"
    recorder = Recorder(file, Display())
    recorder.rows([])
    assert read_results(path)[1] == file.rows
    recorder.rows(decode_rows())
    assert read_results(path)[1] == recorder.all_rows(expected) == [*prefill_rows(), *decode_rows()]
    assert complete_cases(read_results(path)[1], expected) == {PREFILL, DECODE}
    file.put(decode_rows()[:1])
    assert read_results(path)[1] == [*prefill_rows(), *decode_rows()[:1]], "none of other rounds is left"


def test_of_rows_that_stand_twice_the_later_counts(tmp_path):
    path = tmp_path / "rows.jsonl"
    ResultsFile(path, SETTINGS, resumes=False).put(prefill_rows())
    first, alone, ranks = path.read_text().splitlines(keepends=True)
    earlier = alone.replace('"median": 10.0', '"median": 11.0')
    assert earlier != alone
    path.write_text(first + earlier + ranks + alone)
    assert read_results(path)[1] == prefill_rows()


def test_another_degree_makes_a_case_incomplete():
    """Rows of one case are of the same rounds."""
    more = {PREFILL: [ALONE, SHARDED, Form("own", 4, 1, 4, "sharded")]}
    assert complete_cases(prefill_rows(), more) == set()


@pytest.mark.parametrize(
    "change, told",
    [
        ({"threads": 4}, "threads is 2 there and 4 now"),
        ({"machine": {**MACHINE, "cpu": "another"}}, "machine is "),
        ({"extra": 1}, "extra is null there and 1 now"),
    ],
)
def test_a_file_of_other_settings_is_refused_in_one_line(tmp_path, change, told):
    path = tmp_path / "rows.jsonl"
    ResultsFile(path, SETTINGS, resumes=False).put(prefill_rows()[:1])
    before = path.read_bytes()
    with pytest.raises(RequestError, match="was measured with other settings") as caught:
        ResultsFile(path, {**SETTINGS, **change}, resumes=True)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content, told",
    [("[1]\n", "line 1: it is no JSON object"), ('{"kind": "row"}\n', "its first line"),
     ("a diary", "its first line"), ('{"kind": "settings of', "its first line"),
     ('{"kind": "settings"}\n{"kind": "row", "case": {}}\n', "a row that makes no sense")],
)  # fmt: skip
def test_a_file_of_something_else_is_refused(tmp_path, content, told):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(RequestError, match=told):
        ResultsFile(path, SETTINGS, resumes=True)
    assert path.read_text() == content


def test_a_file_that_is_there_is_not_written_over(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("precious")
    with pytest.raises(RequestError, match="--resume goes on with it"):
        ResultsFile(path, SETTINGS, resumes=False)
    assert path.read_text() == "precious"
    ResultsFile(tmp_path / "new.jsonl", SETTINGS, resumes=True)
    with pytest.raises(RequestError, match="cannot be written"):
        ResultsFile(tmp_path / "no" / "rows.jsonl", SETTINGS, resumes=False)


@pytest.mark.parametrize("written", ["", '{"ki', '{"kind": "settings", "date": "20'])
def test_a_first_line_that_was_cut_off_is_written_anew(tmp_path, written):
    path = tmp_path / "rows.jsonl"
    path.write_text(written)
    assert ResultsFile(path, SETTINGS, resumes=True).rows == []
    assert read_results(path) == (SETTINGS, [])


def test_charts_show_speed_up_efficiency_and_what_times_are_made_of():
    rows = [*decode_rows(), *prefill_rows(SHARDED)]
    found = charts(rows, "m")
    assert list(found) == [
        f"{scaling}-{name}" for scaling in ("strong", "weak-batch") for name in ("speed-up", "efficiency", "time")
    ]
    (panel,) = found["strong-speed-up"].panels
    (line,) = panel.lines
    assert (panel.title, line.label) == ("decode", "replicate: 3 × 64 + 5, bfloat16")
    assert (line.degrees, line.medians, line.lower_quartiles) == ((1, 2), (1.0, 0.625), (1.0, 0.5625))
    assert panel.ideal == ((1, 1.0), (2, 1.0))
    (bars,) = found["strong-time"].panels
    assert bars.bars[0] == Bar("t = 1", 20.0, 0.0, 10.0, 30.0)
    assert bars.bars[1] == Bar("t = 2\nreplicate", 28.0, 2.0, 20.0, 40.0)
    assert bars.bars[2].label == "vllm tp=2"


def test_a_picture_holds_the_numbers_that_it_shows():
    chart = charts(decode_rows(), "m")["strong-time"]
    picture = draw(chart)
    assert picture.startswith(b"\x89PNG")
    assert data_of(picture) == json.loads(json.dumps(chart.to_json()))
    other = charts(decode_rows()[:2], "m")["strong-time"]
    assert data_of(picture) != json.loads(json.dumps(other.to_json()))
    assert draw(charts(decode_rows(), "m")["strong-speed-up"]).startswith(b"\x89PNG")
