"""Errors are typed and short, every type has a documented exit status, and warnings are few and come once."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import tp.errors
from launch import __main__ as command_line
from tp import choice
from tp.errors import TensorParallelError

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for room in ("tp", "launch") for path in (ROOT / room).rglob("*.py"))
DOCUMENTED = re.compile(r"^\| (\d+) \| .+ \|$", re.MULTILINE)

ERRORS = {
    name: kind
    for name, kind in vars(tp.errors).items()
    if isinstance(kind, type) and issubclass(kind, TensorParallelError)
}

UNTYPED = {
    # Python's own protocols
    ("tp/__init__.py", "AttributeError"): "what the import system asks of a module's __getattr__",
    ("tp/generation/stream.py", "StopIteration"): "an iterator's end",
    ("tp/training/data/packing.py", "IndexError"): "a sequence's end",
    # Caught before they leave their module, or by the one that calls it
    ("tp/checkpoint/gguf_header.py", "ValueError"): "becomes a CheckpointError that names the file",
    ("tp/checkpoint/safetensors_source.py", "ValueError"): "becomes a CheckpointError that names the file",
    ("tp/checkpoint/safetensors_source.py", "TypeError"): "becomes a CheckpointError that names the file",
    ("tp/chat_template.py", "ValueError"): "becomes the typed error of whoever wanted the template",
    ("tp/chat_template.py", "OutOfTime"): "becomes the typed error of whoever wanted the template",
    ("launch/training_recipe.py", "ValueError"): "becomes a CheckpointError that names run.json",
    ("tp/json_objects.py", "ValueError"): "becomes the typed error of whoever reads the file",
    ("tp/parallel/shared_segment.py", "OSError"): "gloo takes over, with a warning",
    ("tp/planning/hardware.py", "ValueError"): "becomes a RequestError that names the profile",
    ("tp/generation/decode_graphs.py", "CaptureError"): "steps go on uncaptured, with a warning",
    ("launch/demo_checkpoint.py", "UnavailableError"): "the embedded model takes over",
    # argparse's protocol, which makes a usage error of it
    ("launch/arguments.py", "argparse.ArgumentTypeError"): "exit status 2",
    ("launch/benching/options.py", "argparse.ArgumentTypeError"): "exit status 2",
    ("launch/planning/degrees.py", "argparse.ArgumentTypeError"): "exit status 2",
    # Mistakes of whoever writes this code
    ("tp/layers/parameter.py", "TypeError"): "a parameter in a module of the wrong class",
    ("launch/inspection/scales.py", "AssertionError"): "cannot be reached",
    ("launch/measurement/engine/requests.py", "ValueError"): "a kind of request that the code names",
    ("launch/measurement/spread.py", "ValueError"): "statistics of no values",
}
"""Where something else than a typed error is raised, and why that reaches no user as it is."""


def _raises(path: Path) -> Iterator[tuple[ast.Raise, str]]:
    """Statements that raise a new error, with the name of its class."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            name = ast.unparse(raised)
            if re.match(r"[A-Z]", name.rpartition(".")[2]):  # else an error that was made elsewhere
                yield node, name


TYPED = {*ERRORS, "ContestantError"}
"""Names of typed errors: of tp.errors, and one that launch derives from them."""


@pytest.mark.parametrize("room", ["tp", "launch"])
def test_what_is_raised_is_typed(room: str) -> None:
    found = {}
    for path in SOURCES:
        name_in_tree = path.relative_to(ROOT).as_posix()
        for node, name in _raises(path):
            if name_in_tree.startswith(room) and name not in TYPED:
                found[name_in_tree, name] = node.lineno
    assert found.keys() - UNTYPED.keys() == set(), found


def _texts(node: ast.Raise) -> list[ast.expr]:
    call = node.exc
    return list(call.args[:1]) if isinstance(call, ast.Call) else []


def test_a_typed_error_says_something_of_its_own_in_at_most_two_lines() -> None:
    bare = []
    for path in SOURCES:
        for node, name in _raises(path):
            if name not in ERRORS:
                continue
            texts = _texts(node)
            place = f"{path.relative_to(ROOT)}:{node.lineno}"
            constants = [part.value for text in texts for part in ast.walk(text)
                         if isinstance(part, ast.Constant) and isinstance(part.value, str)]  # fmt: skip
            assert sum(text.count("\n") for text in constants) <= 1, place
            has_value = any(isinstance(part, ast.FormattedValue) for text in texts for part in ast.walk(text))
            calls_another = texts and isinstance(texts[0], (ast.Name, ast.Attribute, ast.Call))
            if not texts or (not calls_another and not has_value and len("".join(constants)) < 12):
                bare.append(place)
    assert bare == []


def test_every_exit_status_is_documented_and_none_is_that_does_not_exist() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    documented = set(map(int, DOCUMENTED.findall(page[page.index("## Errors and exit status") :])))
    raised = {kind.exit_code for kind in ERRORS.values()}
    assert documented == raised | {0, 130}
    shown = set(map(int, re.findall(r"(?:^|  )(\d+) [a-zA-Z]", command_line.EPILOG.partition("exit status:")[2], re.M)))
    assert shown == documented


def test_every_type_says_what_it_is_for_and_no_two_kinds_share_a_status() -> None:
    for name, kind in ERRORS.items():
        assert kind.__doc__ and kind.__doc__.rstrip().endswith("."), name
    own = {name: kind.exit_code for name, kind in ERRORS.items() if "exit_code" in vars(kind)}
    assert len(set(own.values())) == len(own)
    for name in ERRORS.keys() - own.keys():  # these are of a kind that has one
        assert ERRORS[name].exit_code in own.values()


@pytest.mark.parametrize("kind", ERRORS.values())
def test_a_command_ends_with_the_status_of_its_error(
    kind: type[TensorParallelError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line without --debug; with it the traceback too, of typed errors as of others."""

    def fail(argv: list[str]) -> int:
        raise kind("what went wrong")

    monkeypatch.setattr(command_line, "_execute", fail)
    assert command_line.main(["info"]) == kind.exit_code
    assert capsys.readouterr() == ("", "error: what went wrong\n")
    assert command_line.main(["info", "--debug"]) == kind.exit_code
    told = capsys.readouterr().err
    assert told.startswith("Traceback (most recent call last):") and "in fail" in told
    assert told.endswith(f"tp.errors.{kind.__name__}: what went wrong\nerror: what went wrong\n")


# --- warnings ---

MAY_WARN = {"tp/choice.py", "tp/training/data/cache.py"}


def test_only_two_places_warn() -> None:
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "warn"):
                found.add(path.relative_to(ROOT).as_posix())
    assert found == MAY_WARN


def test_a_warning_comes_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for reason in ("it is a test", "it is a test", "it is another"):
            choice.warn_once("test_a_warning_comes_once", reason)
    assert [str(warning.message).rpartition(": ")[2] for warning in caught] == ["it is a test", "it is another"]
