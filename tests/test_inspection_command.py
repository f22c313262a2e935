"""`inspect`: its numbers against transformers and at every degree, its report as a browser reads it, its errors."""

from __future__ import annotations

import html
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from norm_placement_models import placement_config
from tiny_models import transformers_model

import launch.inspect
from launch import inputs
from launch.__main__ import build_parser, main
from launch.inspection.gather import MOST_POSITIONS, look, shown_positions
from launch.inspection.page import page
from launch.inspection.question import Question
from launch.inspection.scales import Scale, linear_ticks, logarithmic_ticks, tick_text
from launch.inspection.target import token_of
from launch.inspection.token_text import TokenTexts, bytes_of, visible
from launch.terminal import Terminal
from tp.config import ModelConfig
from tp.errors import RequestError
from tp.generation import LanguageModel
from tp.models import initialise_parameters

HOSTILE = '</script><img/src="//evil.example/x"/onerror=alert(1)>&amp;'
HOSTILE_ID = 257
IDS = [83, 71, 68, 220, HOSTILE_ID, 74, 88]
VOCABULARY = 263
LINE = re.compile(r"[-+−]?\d+(?:\.\d+)?(?:e[-+]\d+)?")
VOID = {"meta", "input", "img", "br", "link"}


@pytest.fixture(scope="module")
def reference() -> Any:
    """The model in transformers, with a tokenizer of bytes and one token that a careless page would run."""
    return transformers_model("qwen2", vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, reference: Any) -> Path:
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    directory = tmp_path_factory.mktemp("inspection") / "model"
    reference.save_pretrained(directory)
    vocabulary = {byte: token_id for token_id, byte in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[])
    tokenizer.add_tokens([HOSTILE])
    assert tokenizer.convert_tokens_to_ids(HOSTILE) == HOSTILE_ID
    tokenizer.save_pretrained(directory)
    return directory


def _inspect(group: Any, *options: str) -> str:
    """The command on one rank: what it writes to stdout."""
    arguments = build_parser().parse_args(["inspect", "--device", "cpu", *options])
    inputs.check(arguments)
    launch.inspect.check(arguments)
    terminal = Terminal(io.StringIO(), io.StringIO(), speaks=group.rank == 0)
    launch.inspect.run(arguments, group, terminal)
    return terminal.out.getvalue()


@pytest.fixture(scope="module")
def options(model: Path) -> list[str]:
    return ["--model", str(model), "--prompt-ids", ",".join(map(str, IDS)), "--against", "t"]


@pytest.fixture(scope="module")
def found(ranks: Any, options: list[str]) -> dict[str, Any]:
    """The JSON object at t = 1."""
    return json.loads(ranks(1).run(_inspect, *options, "--json")[0])


def test_the_numbers_are_those_of_transformers(found: dict[str, Any], reference: Any) -> None:
    with torch.no_grad():
        output = reference(torch.tensor([IDS]), output_hidden_states=True)
        states = [state[0] for state in output.hidden_states[:-1]]  # the last is after the final norm
        logits = output.logits[0]
        early = reference.lm_head(reference.model.norm(states[1])).softmax(-1)
    close = {"rel": 1e-4, "abs": 1e-5}
    assert found["embed_norms"] == pytest.approx(states[0].norm(dim=-1).tolist(), **close)
    for layer, state in zip(found["layers"], states[1:], strict=False):
        assert layer["stream_norms"] == pytest.approx(state.norm(dim=-1).tolist(), **close)
    for column, probabilities in enumerate(early):
        best, entropy = probabilities.topk(5), -(probabilities * probabilities.log()).sum()
        cell = found["lens"][1][column]
        assert cell["token_ids"] == best.indices.tolist()
        assert cell["probabilities"] == pytest.approx(best.values.tolist(), **close)
        assert cell["entropy"] == pytest.approx(entropy.item(), **close)
    final = logits.softmax(-1)
    kl = (final * (final.log() - early.log())).sum(-1)
    assert [cell["kl"] for cell in found["lens"][1]] == pytest.approx(kl.tolist(), **close)
    assert all(cell["kl"] < 1e-6 for cell in found["lens"][-1])
    target = int(logits[-1].argmax())
    assert found["target"]["token_id"] == target and found["against"] == {"token_id": 83, "token": "t"}
    assert found["target"]["probability"] == pytest.approx(final[-1, target].item(), **close)
    assert found["target_by_state"][1] == pytest.approx(early[-1, target].item(), **close)
    attribution = found["attribution"]
    assert attribution["logit"] == pytest.approx((logits[-1, target] - logits[-1, 83]).item(), **close)
    parts = [attribution[name] for name in ("embedding", "final_bias", "rounding")]
    assert sum([*parts, *attribution["attention"], *attribution["mlp"]]) == pytest.approx(attribution["logit"])
    heads = [sum(of_layer) for of_layer in attribution["heads"]]
    assert heads == pytest.approx(attribution["attention"], **close)


def test_cosines_are_between_a_write_and_the_state_that_it_is_added_to(found: dict[str, Any]) -> None:
    """‖x + a + m‖ follows from the norms and the cosines: ‖x + a‖² = ‖x‖² + ‖a‖² + 2 ‖x‖ ‖a‖ cos."""
    before = found["embed_norms"]
    for layer in found["layers"]:
        middle = _norms_of_sums(before, layer["attention_norms"], layer["attention_cosines"])
        after = _norms_of_sums(middle, layer["mlp_norms"], layer["mlp_cosines"])
        assert layer["stream_norms"] == pytest.approx(after, rel=1e-4)
        before = layer["stream_norms"]


def _norms_of_sums(states: list[float], writes: list[float], cosines: list[float]) -> list[float]:
    return [(x * x + a * a + 2 * x * a * cos) ** 0.5 for x, a, cos in zip(states, writes, cosines, strict=True)]


@pytest.mark.parametrize("layout", ["off", "on"])
def test_json_and_table_are_the_same_at_two_ranks(
    layout: str, ranks: Any, options: list[str], found: dict[str, Any]
) -> None:
    outputs = ranks(2).run(_inspect, *options, "--json", "--sequence-parallel", layout)
    assert outputs[1] == "" and outputs[0].count("\n") == 1
    parallel = json.loads(outputs[0])
    assert parallel.pop("tp_size") == 2
    assert _same(parallel, {name: value for name, value in found.items() if name != "tp_size"})
    if layout == "on":
        return
    single, double = (ranks(t).run(_inspect, *options)[0] for t in (1, 2))
    assert LINE.sub("", single) == LINE.sub("", double)
    assert _figures(single) == pytest.approx(_figures(double), rel=2e-3, abs=1.5e-2)
    rows = single.splitlines()
    assert rows[2].split()[0] == "embed" and rows[5].split()[0] == "2"
    layer = found["layers"][2]
    others = sum(layer["stream_norms"][1:]) / (len(IDS) - 1)
    assert _figures(rows[5])[1:3] == pytest.approx([layer["stream_norms"][0], others], rel=1e-3)
    assert float(rows[5].split()[-2]) == pytest.approx(found["lens"][-1][-1]["probabilities"][0], abs=1e-4)


def _figures(text: str) -> list[float]:
    return [float(number.replace("−", "-")) for number in LINE.findall(text)]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == (pytest.approx(other, rel=1e-4, abs=1e-5) if isinstance(other, float) else other)


class Reader(HTMLParser):
    """Reads a page as strictly as XML: every element is closed in order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @classmethod
    def of(cls, text: str) -> Reader:
        reader = cls()
        reader.feed(text)
        reader.close()
        assert reader.open == []
        return reader


def test_the_report_is_one_file_that_fetches_and_runs_nothing_foreign(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, pictures = tmp_path / "report.html", tmp_path / "new" / "pictures"
    files = ["--html", str(target), "--png", str(pictures)]
    assert main(["inspect", *options, "--target", f"id:{HOSTILE_ID}", "--tp", "1", "--device", "cpu", *files]) == 0
    output = capsys.readouterr()
    assert output.out.startswith(" ") and f"{HOSTILE} comes next" in output.out
    assert output.err.splitlines() == [
        f"written: {path}"
        for path in (target, *(pictures / name for name in ("norms.png", "lens.png", "contributions.png")))
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "report.html"]  # nothing unfinished is left

    text = target.read_text(encoding="utf-8")
    reader = Reader.of(text)
    names = [tag for tag, _ in reader.elements]
    assert not {"img", "link", "iframe", "object", "base", "use", "image"} & set(names) and names.count("script") == 1
    for _, attributes in reader.elements:
        assert not {"src", "href", "xlink:href", "srcset", "action"} & attributes.keys()
        assert not any(name.startswith("on") for name in attributes)
    for foreign in ("http:", "https:", "url(", "@import", "<img", "onerror=alert(1)>"):
        assert foreign not in text.replace(html.escape(HOSTILE), "")
    (policy,) = [each["content"] for _, each in reader.elements if "http-equiv" in each]
    assert policy.startswith("default-src 'none';")
    assert HOSTILE in reader.texts

    tips = [each["data-tip"] for tag, each in reader.elements if tag == "td" and "data-tip" in each]
    assert len(tips) == 4 * len(IDS)  # states × tokens
    assert tips[4].startswith(f"after the embedding, at token 4 {HOSTILE}\n")
    assert all("entropy\t" in tip and "KL to the final prediction\t" in tip for tip in tips)
    assert names.count("svg") == 7
    heads = [each["data-tip"] for tag, each in reader.elements if each.get("class", "").startswith("cell ")]
    assert len(heads) == 3 * 6 and heads[7].startswith("layer 1, head 2: ")


def test_a_post_norm_model_has_no_attribution_and_says_so() -> None:
    config = ModelConfig.from_hf(placement_config("post", "layer_norm", False))
    model = LanguageModel(config)
    initialise_parameters(model, seed=0)
    run = launch.inspect.Run("m", 1, "float32", "plain", "cpu", "post")
    found = look(model.eval(), Question((1, 2, 3), 5, None), run, lambda done, total: None)
    assert found.attribution is None and found.as_json(TokenTexts(None))["attribution"] is None
    assert len(found.lens) == 3 and found.lens[-1][-1].kl == pytest.approx(0, abs=1e-9)
    report = "".join(Reader.of(page(found, TokenTexts(None))).texts)
    assert "no linear path" in report and "#5 comes next" in report and "Contribution" not in report
    single = look(model, Question((1,), None, None), run, lambda done, total: None)
    Reader.of(page(single, TokenTexts(None)))
    assert launch.inspect.table(single, TokenTexts(None)).splitlines()[3].split()[2] == "-"  # no other position


@pytest.mark.parametrize(
    "options, message",
    [
        (["--prompt", ""], "--prompt is empty: there is nothing to work on"),
        (["--prompt", "a", "--prompt", "b"], "inspect takes one prompt: run it once for each"),
        (["--prompt-ids", "1", "--target", ""], "--target is empty: give the text of one token, or id:N"),
        (["--prompt-ids", "1", "--html", "{tmp}"], "--html {tmp} is not a file: name one that may be written"),
        (["--prompt-ids", "1", "--html", "{tmp}/no/r.html"], "--html {tmp}/no/r.html cannot be written: there is no"),
        (["--prompt-ids", "1", "--png", "{tmp}/file/x"], "--png {tmp}/file/x cannot be made: Not a directory"),
    ],
)
def test_what_cannot_be_served_is_told_before_the_model_is_loaded(
    options: list[str], message: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "file").touch()
    monkeypatch.setattr(launch.inspect, "load_model", lambda *arguments: pytest.fail("loaded"))
    options = [option.format(tmp=tmp_path) for option in options]
    assert main(["inspect", "--model", str(model), "--tp", "1", *options]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert output.err.startswith(f"error: {message.format(tmp=tmp_path)}")


@pytest.mark.parametrize(
    "target, message",
    [
        ("the", "--target 'the' is 3 tokens (t h e): give the text of one, with its space in front if"),
        ("id:263", "--target id:263 is outside the vocabulary: ids are 0 to 262"),
        ("id:" + "9" * 5000, "--target 'id:999"),
    ],
)
def test_a_target_that_is_no_token(target: str, message: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["inspect", "--model", str(model), "--tp", "1", "--device", "cpu", "--prompt", "a"]
    assert main([*command, "--target", target]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith(f"error: {message}") and output.err.count("\n") == 1


def test_a_target_that_the_tokenizer_has_and_the_model_has_not() -> None:
    class Tokenizer:
        def encode(self, text: str, **options: bool) -> list[int]:
            return [97]

    model = LanguageModel(ModelConfig.from_hf(placement_config("post", "layer_norm", False)))
    model.tokenizer = Tokenizer()
    with pytest.raises(RequestError, match="--target 'x', id 97, is outside the vocabulary: ids are 0 to 96"):
        token_of("--target", "x", model)


def test_labels_of_tokens() -> None:
    assert visible(" Paris") == "␣Paris" and visible("a\r\n\tb") == "a␍↵⇥b"
    assert visible(" " * 3) == "␣␣␣" and visible(" " * 16 + "x") == "␣×16x"
    assert visible("\x1b[2J\u202e\u00a0") == "\\u001b[2J\\u202e\\u00a0"
    assert visible("\u0301") == "◌\u0301" and visible("日本") == "日本"
    assert bytes_of("<0xE2>") == b"\xe2" and bytes_of("âĢ") == b"\xe2\x80" and bytes_of("▁a") is None
    assert TokenTexts(None).label(7) == "#7" and TokenTexts(None).texts([7]) is None


def test_labels_of_byte_and_sentencepiece_tokens() -> None:
    class Tokenizer:
        pieces = ("âĢ", "▁word", "<0x0A>", "<0xE2>", None)
        texts = ("\ufffd", "word", "\n", "\ufffd", "")

        def convert_ids_to_tokens(self, token_id: int) -> str | None:
            return self.pieces[token_id]

        def decode(self, ids: list[int], **options: bool) -> str:
            return self.texts[ids[0]]

    texts = TokenTexts(Tokenizer())
    assert [texts.label(token_id) for token_id in range(5)] == ["‹E2 80›", "␣word", "↵", "‹E2›", "#4"]


def test_of_a_long_prompt_the_first_and_the_last_positions_are_shown() -> None:
    assert shown_positions(1) == (0,) and shown_positions(5) == tuple(range(5))
    assert shown_positions(MOST_POSITIONS) == tuple(range(MOST_POSITIONS))
    long = shown_positions(1000)
    assert len(long) == MOST_POSITIONS and long[:2] == (0, 1000 - MOST_POSITIONS + 1) and long[-1] == 999


def test_axes() -> None:
    assert linear_ticks(-1.2, 3.1) == (-1, 0, 1, 2, 3)
    assert logarithmic_ticks(0.8, 30) == (1, 2, 5, 10, 20)
    assert logarithmic_ticks(1e-9, 1) == pytest.approx((1e-8, 1e-6, 1e-4, 1e-2, 1))
    assert [tick_text(value) for value in (-0.5, 20, 20000, 0.01)] == ["−0.5", "20", "20k", "0.01"]
    assert [tick_text(value) for value in (1e-8, 2e-13)] == ["10⁻⁸", "2·10⁻¹³"]
    logarithmic = Scale.of([1, 100], 0, 10, is_logarithmic=True)
    assert logarithmic(10) == pytest.approx(5) and logarithmic(0) == 0
    assert Scale.of([0.0], 0, 10, is_logarithmic=False)(0) == 0
