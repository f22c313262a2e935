"""`launch plan` as a user runs it: tables, JSON, plot; and one line for what cannot be planned."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import hub_config

from launch.__main__ import main
from launch.plan import model_name
from launch.planning import calibration, plot
from launch.planning.plot import figure_of
from tp.planning.hardware import ANY_DEGREE, load_profile

LARGE = {
    "model_type": "qwen2",
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A config.json alone: there are no weights to read."""
    path = tmp_path / "large.json"
    path.write_text(json.dumps(LARGE))
    return path


def planned(capfd: pytest.CaptureFixture[str], *argv: str | Path) -> dict[str, Any]:
    assert main(["plan", *map(str, argv), "--json"]) == 0
    content: dict[str, Any] = json.loads(capfd.readouterr().out)  # one object, and nothing else
    return content


def complaint(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str]:
    status = main(["plan", *map(str, argv)])
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("error: ") and output.err.count("\n") == 1
    return status, output.err.removeprefix("error: ").strip()


def test_json_has_every_rank_and_part(large: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = planned(capfd, "--model", large, "--hardware", "H100", "--tp", "1,8", "--batch", "2")
    assert (plan["hardware"], plan["dtype"], plan["batch"], plan["context"]) == ("H100", "bfloat16", 2, 4096)
    one, eight = plan["degrees"]
    assert not one["fits"] and one["short_bytes"] > 60e9 and one["largest_batch"] == 0
    assert eight["fits"] and len(eight["ranks"]) == 8 and eight["nodes"] == 1
    for rank in eight["ranks"]:
        assert rank["total"] == sum(value for name, value in rank.items() if name != "total")
    for step in (eight["decode"], eight["prefill"]):
        assert step["seconds"] == pytest.approx(sum(step["parts"].values()))
    assert eight["decode"]["tokens_per_s"] == pytest.approx(2 / eight["decode"]["seconds"])
    assert eight["efficiency"] == pytest.approx(eight["speed_up"] / 8)
    assert eight["collectives"]["decode"]["calls"] == 2 * 80 + 1 + 2
    assert plan["best"] == {"latency": 8, "throughput": 8} and plan["sources"]


def test_tables_say_what_does_not_fit_and_what_is_best(large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(large), "--hardware", "h100", "--tp", "1,2-4"]) == 0
    shown = capsys.readouterr().out
    assert "serving" in shown and "Parts of a decode step, ms" in shown and "too little" in shown
    assert "does not fit: --tp 1 needs" in shown and "best for latency: --tp 4" in shown


def test_tables_name_the_batch_the_limits_and_the_steps(large: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of a batch beyond what can be captured, a context that the model ends, and times from 30 ms to a second."""
    options = ("--model", large, "--hardware", "h200", "--tp", "4,8", "--context", "512", "--prefill-chunk", "256")
    degrees = planned(capfd, *options)["degrees"]
    assert all(degree["throughput_batch"] == 256 < degree["largest_batch"] for degree in degrees)
    assert all(degree["largest_context"] == 32768 for degree in degrees)
    assert main(["plan", *map(str, options), "--batch", "8"]) == 0
    shown = capfd.readouterr().out
    for degree in planned(capfd, *options, "--batch", "8")["degrees"]:
        rate = degree["throughput_tokens_per_s"] / degree["tp_size"]
        assert f"{rate:,.1f} at batch 256" in shown
        for times in (degree["decode"], degree["prefill"]):
            for part, seconds in times["parts"].items():
                assert part == "optimizer_s" or f" {1e3 * seconds:,.3f} " in shown
    assert shown.count("32,768 (the model's)") == 2
    assert "Parts of the prefill in steps of 256 tokens, ms" in shown
    assert "fixed cost: layers" in shown and "collectives: bytes" in shown and "e+0" not in shown


def test_help_lists_the_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "a100-80g, a100-80g-330w, b200" in " ".join(capsys.readouterr().out.split())


def test_a_range_leaves_out_what_cannot_be_placed(large: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = planned(capfd, "--model", large, "--hardware", "h200", "--tp", "5-40", "--nodes", "2")
    assert [degree["tp_size"] for degree in plan["degrees"]] == [5, 6, 7, 8, 10, 12, 14, 16]
    usual = planned(capfd, "--model", large, "--hardware", "h200", "--nodes", "3")
    assert [degree["tp_size"] for degree in usual["degrees"]] == [1, 2, 4, 8, 16]


def test_training_has_its_own_plan(large: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ("--model", large, "--hardware", "b200", "--tp", "8", "--train", "--context", "2048")
    plan = planned(capfd, *options)["degrees"][0]
    assert plan["activations"]["sharded"] < plan["activations"]["replicated"]
    assert plan["step"]["parts"]["optimizer_s"] > 0
    assert main(["plan", *map(str, options)]) == 0
    assert "Parts of a training step" in capfd.readouterr().out


def test_int8_weights_take_about_half(large: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ("--model", large, "--hardware", "H200", "--tp", "2")
    plain, int8 = (planned(capfd, *options, "--weights", kind)["degrees"][0] for kind in ("plain", "int8"))
    assert int8["ranks"][0]["weights"] == pytest.approx(plain["ranks"][0]["weights"] / 2, rel=0.01)
    assert int8["decode"]["seconds"] < plain["decode"]["seconds"]


def test_a_plot_says_of_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two of the degrees have room for 146 GB."""
    figures = []
    monkeypatch.setattr(plot, "figure_of", lambda *asked: figures.append(figure_of(*asked)) or figures[-1])
    (tmp_path / "two-small").mkdir()
    config = tmp_path / "two-small" / "config.json"
    config.write_text(json.dumps(LARGE))
    path = tmp_path / "plan.png"
    for options in (["--tp", "1,2,4,8"], ["--tp", "2,4", "--train"]):
        main(["plan", "--model", str(config), "--hardware", "h100", *options, "--plot", str(path), "--json"])
        assert path.read_bytes().startswith(b"\x89PNG")
        path.unlink()
    serving, training = (figure.axes[0] for figure in figures)
    assert serving.get_title() == "predicted decode of two-small on H100, 1 sequence of 4,096 tokens"
    assert training.get_title() == "predicted training of two-small on H100, 1 sequence of 4,096 tokens"
    texts = [text.get_text() for text in serving.get_legend().get_texts()]
    assert texts == ["two-small", "if nothing were lost", "does not fit"]


def test_a_plot_of_ranges_has_them_and_numbers_as_people_write_them() -> None:
    curve = plot.Curve("m", [1, 2], [4000.0, 7000.0], [True, True], [(3000.0, 4500.0), (6000.0, 7500.0)])
    figure = figure_of([curve], "title")
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()][1:] == [
        "if nothing were lost", "range of the prediction",
    ]  # fmt: skip
    (shaded,) = axes.collections
    extent = shaded.get_paths()[0].get_extents()
    assert (extent.ymin, extent.ymax) == (3000.0, 7500.0)
    shown = [label.get_text() for label in axes.get_yticklabels(which="both")]
    assert "5,000" in shown and not any("10" in text and "," not in text for text in shown)


@pytest.mark.parametrize(
    "model, name", [("/models/m-7b/config.json", "m-7b"), ("x/m.gguf", "m"), ("org/m-0.5b", "m-0.5b"), ("m.json", "m")]
)
def test_a_model_is_called_by_its_name(model: str, name: str) -> None:
    assert model_name(model) == name


def test_where_nothing_fits_the_plan_is_shown_and_the_status_is_five(
    large: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", str(large), "--hardware", "rtx-4090", "--tp", "1,2"]) == 5
    output = capsys.readouterr()
    assert "too little" in output.out
    assert output.err.startswith("error: nothing fits: --tp 2 needs 7") and output.err.count("\n") == 1


def test_a_profile_from_a_file(large: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.json").write_text(load_profile("H100").to_json())
    plan = planned(capfd, "--model", large, "--hardware", tmp_path / "mine.json", "--tp", "8")
    assert plan["hardware"] == "H100"


@pytest.mark.parametrize(
    "options, status, message",
    [
        ([], 2, "--model is missing"),
        (["--model", "LARGE"], 2, "--hardware is missing: a file, or one of a100-80g, a100-80g-330w, b200"),
        (["--model", "LARGE", "--hardware", "H1"], 2, "there is no hardware profile or file H1: choose from"),
        (
            ["--model", "LARGE", "--hardware", "H100", "--tp", "65"],
            3,
            "degree 65 is outside 1..64: num_attention_heads",
        ),
        (
            ["--model", "LARGE", "--hardware", "H100", "--tp", "16"],
            2,
            "--tp 16 cannot be dealt out evenly over 1 node of 8",
        ),
        (["--model", "LARGE", "--hardware", "H100", "--tp", "65-70"], 3, "degree 65 is outside 1..64"),
        (["--model", "LARGE", "--hardware", "H100", "--tp", "8-1"], 2, "'8-1' is not a range such as 1-8"),
        (["--model", "LARGE", "--hardware", "H100", "--tp", "x"], 2, "'x' is not an integer of at least 1"),
        (["--model", "LARGE", "--hardware", "H100", "--context", "40000"], 5, "--context 40000 is more than the 32768"),
        (["--model", "LARGE", "--hardware", "H100", "--out", "f"], 2, "--out goes with --calibrate"),
        (["--model", "LARGE", "--hardware", "H100", "--activation-checkpointing"], 2, "needs --train"),
        (["--model", "LARGE", "--hardware", "H100", "--train", "--weights", "int8"], 2, "contradict each other"),
        (["--model", "/nowhere/config.json", "--hardware", "H100"], 4, "is neither a file or directory nor a Hub id"),
        (
            ["--model", "LARGE", "--hardware", "H100", "--tp", "8", "--plot", "/nowhere/p.png"],
            2,
            "--plot /nowhere/p.png",
        ),
        (["--calibrate"], 2, "--calibrate needs --out FILE"),
        (["--calibrate", "--out", "f", "--model", "m"], 2, "it takes no --model and no --hardware"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    large: Path, capsys: pytest.CaptureFixture[str], options: list[str], status: int, message: str
) -> None:
    found, said = complaint(capsys, *(str(large) if option == "LARGE" else option for option in options))
    assert message in said and found == status


def test_what_a_calibration_cannot_write_is_refused_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibration, "calibrate", lambda *_: pytest.fail("it has begun to measure"))
    for out in (tmp_path / "absent" / "here.json", tmp_path):
        assert complaint(capsys, "--calibrate", "--out", out)[0] == 2
    options = ("--calibrate", "--out", tmp_path / "here.json", "--plot", tmp_path / "p.png")
    assert "--calibrate has nothing to draw" in complaint(capsys, *options)[1]


def test_a_profile_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "here.json"
    monkeypatch.setattr(calibration, "measure", lambda *_: None)
    monkeypatch.setattr(calibration, "make_profile", lambda *_: load_profile("H100"))
    assert main(["plan", "--calibrate", "--out", str(out)]) == 0
    assert "each of 0 ranks" in capsys.readouterr().out
    assert load_profile(str(out)) == load_profile("H100")
    before = out.read_bytes()

    def full(path: Path, content: bytes) -> None:
        with path.open("wb") as half:
            half.write(content[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr(Path, "write_text", lambda path, text, **_: full(path, text.encode()))
    assert (
        complaint(capsys, "--calibrate", "--out", out)[1] == f"--out {out} cannot be written: No space left on device"
    )
    assert out.read_bytes() == before and list(tmp_path.iterdir()) == [out]


def test_degrees_that_were_not_measured_are_left_out_of_ranges(
    large: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    profile = load_profile("H200")
    rates = profile.rates[ANY_DEGREE]
    (tmp_path / "mine.json").write_text(replace(profile, rates={2: rates, 4: rates}).to_json())
    options = ("--model", large, "--hardware", tmp_path / "mine.json")
    for degrees in (["--tp", "1-8"], []):
        assert [degree["tp_size"] for degree in planned(capfd, *options, *degrees)["degrees"]] == [2, 4]
    assert "was measured at degrees 2, 4 only" in complaint(capfd, *options, "--tp", "5-8")[1]


def test_a_profile_of_no_degree_that_the_model_has(
    large: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    profile = load_profile("H100")
    large_only = replace(profile, ranks_per_node=128, rates={128: profile.rates[ANY_DEGREE]})
    (tmp_path / "mine.json").write_text(large_only.to_json())
    status, said = complaint(capfd, "--model", large, "--hardware", tmp_path / "mine.json")
    assert status == 3 and "degree 128 is outside 1..64" in said


def test_training_has_no_steps_of_a_prefill_to_be_too_many(large: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--batch", "2048", "--context", "32768", "--tp", "8", "--json"]
    assert main(["plan", "--model", str(large), "--hardware", "H100", "--train", *options]) == 5
    output = capfd.readouterr()
    assert "too little" in output.err
    gathered = [c for c in json.loads(output.out)["degrees"][0]["collectives"]["step"]["each"] if c["count"] == 65536]
    assert gathered == [{"operation": "all_gather", "nbytes": 1024 * 8 * 16, "count": 65536}]
    assert "--prefill-chunk 512 would cut" in complaint(
        capfd, "--model", large, "--hardware", "H100", *options[:-1]
    )[1]  # fmt: skip


def test_a_directory_needs_no_weights(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hub_config("qwen3")))
    plan = planned(capfd, "--model", tmp_path, "--hardware", "l40s", "--tp", "3", "--dtype", "float32")
    assert plan["degrees"][0]["fits"] and plan["dtype"] == "float32" and plan["context"] == 128
