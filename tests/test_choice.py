"""Names of operations that can be switched off: known, documented, and refused where they are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tp import TensorParallelGroup, choice
from tp.errors import RequestError

ROOT = Path(__file__).parent.parent


def test_every_name_is_documented_and_used():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| name \|\n(.*?)\n\n", page, re.DOTALL)
    documented = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[-2])]
    assert sorted(documented) == list(choice.OPERATIONS)
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tp").rglob("*.py"))
    asking = "enabled|uses_triton|uses_row_kernel|NativeOperation"
    asked = re.compile(rf'(?:{asking})\("(\w+)"|^NAME = "(\w+)"', re.MULTILINE)
    assert {name for pair in asked.findall(code) for name in pair if name} == set(choice.OPERATIONS)


@pytest.mark.parametrize("make", [TensorParallelGroup.alone, TensorParallelGroup.from_environment])
def test_a_mistyped_name_is_refused_before_anything_is_loaded(monkeypatch, make):
    monkeypatch.setattr(choice, "_disabled", None)
    monkeypatch.setenv(choice.DISABLE_VARIABLE, "rms_norm,rms_nrom")
    with pytest.raises(RequestError, match="^TP_DECODER_DISABLE knows no rms_nrom: its names are argmax_and_sum_exp, "):
        make()


def test_what_is_switched_off_stays_where_a_name_is_refused(monkeypatch):
    monkeypatch.setattr(choice, "_disabled", frozenset(["rms_norm"]))
    with pytest.raises(RequestError):
        choice.disable("foo")
    assert choice.disabled() == {"rms_norm"}


def test_code_that_asks_for_an_unlisted_name_is_at_fault():
    with pytest.raises(AssertionError, match="^'foo' is missing in tp.choice.OPERATIONS$"):
        choice.enabled("foo")
