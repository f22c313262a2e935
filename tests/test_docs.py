"""The Python examples of docs/layers.md and docs/getting-started.md run as printed, at every degree.

Those that load SmolLM2 load the embedded model instead: nothing is fetched.
"""

from __future__ import annotations

import contextlib
import io
import re
import unittest.mock
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.default_model import EMBEDDED
from tp.parallel import TensorParallelGroup

DOCS = Path(__file__).parent.parent / "docs"
LAYERS = DOCS / "layers.md"
MLP, BIGRAMS = 0, 1
ALONE, ON_RANKS = 0, 1


def examples(page: Path) -> list[str]:
    sources = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [source.replace("smollm2-135m-instruct.gguf", str(EMBEDDED)) for source in sources]


def _run(group: TensorParallelGroup, source: str) -> tuple[str, Any]:
    """What a script prints, and its `logits`, if it has some."""
    printed = io.StringIO()
    namespace: dict[str, Any] = {"__name__": "example"}
    with (
        unittest.mock.patch.object(TensorParallelGroup, "from_environment", return_value=group),
        unittest.mock.patch.object(torch.distributed, "destroy_process_group"),  # the pool goes on with it
        contextlib.redirect_stdout(printed),
    ):
        exec(source, namespace)  # noqa: S102
    return printed.getvalue().strip(), namespace.get("logits")


@pytest.mark.parametrize("tp_size", [1, 3])
def test_the_mlp_prints_what_the_page_shows(ranks, tp_size):
    printed = {text for text, _ in ranks(tp_size).run(_run, examples(LAYERS)[MLP])}
    assert printed <= set(LAYERS.read_text(encoding="utf-8").splitlines())
    assert len(printed) == tp_size


def test_the_residual_stream_prints_what_the_page_shows_at_three_ranks(ranks):
    ((_, whole),) = ranks(1).run(_run, examples(LAYERS)[BIGRAMS])
    shown = ranks(3).run(_run, examples(LAYERS)[BIGRAMS])
    assert [text for text, _ in shown[1:]] == ["", ""]
    assert f"bigrams.py\n{shown[0][0]}\n```" in LAYERS.read_text(encoding="utf-8")
    for _, logits in shown:
        torch.testing.assert_close(logits, whole, rtol=1e-5, atol=1e-5)


def test_getting_started(ranks):
    sources = examples(DOCS / "getting-started.md")
    ((alone, logits),) = ranks(1).run(_run, sources[ALONE])
    assert alone.endswith(f"({logits.shape[0]}, {logits.shape[1]}, 1024)") and alone.count("\n") >= 2
    first, *others = (text for text, _ in ranks(3).run(_run, sources[ON_RANKS]))
    assert first and others == ["", ""]
