"""The examples of docs/layers.md run as printed, at every degree."""

from __future__ import annotations

import contextlib
import io
import re
import unittest.mock
from pathlib import Path

import pytest
import torch

from tp.parallel import TensorParallelGroup

LAYERS = Path(__file__).parent.parent / "docs" / "layers.md"


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", LAYERS.read_text(encoding="utf-8"), re.DOTALL)


def _run_mlp(group: TensorParallelGroup, source: str) -> str:
    printed = io.StringIO()
    with (
        unittest.mock.patch.object(TensorParallelGroup, "from_environment", return_value=group),
        unittest.mock.patch.object(torch.distributed, "destroy_process_group"),  # the pool goes on with it
        contextlib.redirect_stdout(printed),
    ):
        exec(source, {"__name__": "example"})  # noqa: S102
    return printed.getvalue().strip()


def _run_bigrams(group: TensorParallelGroup, source: str) -> tuple[torch.Tensor, int]:
    from tp.models import initialise_parameters

    namespace: dict = {"__name__": "example"}
    exec(source, namespace)  # noqa: S102
    model = namespace["Bigrams"](vocab=97, width=48, inner=130, depth=3, group=group).to(group.device)
    initialise_parameters(model, seed=0)
    logits = model(torch.arange(10, device=group.device))
    return logits, group.communicator.statistics.calls


@pytest.mark.parametrize("tp_size", [1, 3])
def test_the_mlp_prints_what_the_page_shows(ranks, tp_size):
    printed = ranks(tp_size).run(_run_mlp, examples()[0])
    assert set(printed) <= set(LAYERS.read_text(encoding="utf-8").splitlines())
    assert len(set(printed)) == tp_size


def test_the_residual_stream_at_three_ranks(ranks):
    whole, _ = ranks(1).run(_run_bigrams, examples()[1])[0]
    for logits, collectives in ranks(3).run(_run_bigrams, examples()[1]):
        torch.testing.assert_close(logits, whole, rtol=1e-5, atol=1e-5)
        assert collectives == 5
