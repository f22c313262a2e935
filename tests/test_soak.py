"""Short forms of the soak benchmarks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from pool import RankPool

from benchmarks import soak_serving, soak_training
from benchmarks.soak_serving import MOST_GROWTH, Held, leaks, soak, summary
from tp.parallel import TensorParallelGroup


def test_mixed_requests_give_the_tokens_of_one_rank(ranks: RankPool) -> None:
    seen = ranks(2).run(_soak)[0]
    assert seen["requests"] == 60 and seen["cancelled"] == 6 and seen["compared"] == 18
    assert leaks(seen) == []


def _soak(group: TensorParallelGroup) -> dict[str, Any]:
    soak_serving.COMPARED, soak_serving.SAMPLED = 3, 10
    return soak(group, str(soak_serving.MODEL), 60)


def test_growth_is_told() -> None:
    held = [Held(1000, 10, 5 + (step > 4)) for step in range(8)]
    assert leaks({"ranks": [summary(held[:4]), summary(held)]}) == ["rank 1: files grew by 1"]
    held.append(Held(1001 + MOST_GROWTH["resident"], 10 + MOST_GROWTH["shared"], 5))
    assert leaks({"ranks": [summary(held)]}) == [f"rank 0: resident grew by {MOST_GROWTH['resident'] + 1:,}"]


@pytest.mark.long
def test_a_run_that_is_killed_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    arguments = argparse.Namespace(steps=30, save_every=5, kill_every=10, tp=2)
    seen = soak_training.soak(arguments, tmp_path)
    assert seen["same_losses"] and seen["all_checkpoints"] and len(seen["kills"]) == 2
