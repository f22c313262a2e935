"""The examples of docs/inspection.md run as printed and print what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "inspection.md"


def test_the_examples_print_what_the_page_shows():
    text = PAGE.read_text(encoding="utf-8")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        namespace = {"__name__": "example"}
        for source in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            exec(source, namespace)  # noqa: S102
    assert printed.getvalue() == "".join(re.findall(r"```text\n(.*?)```", text, re.DOTALL))
