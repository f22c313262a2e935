"""A step that cannot be: one that no machine has the memory for, or that is many times the data."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from unittest import mock

import pytest
import torch
from checkpoint_samples import make_config
from pool import RankPool
from test_launch_train import inputs, train_options  # noqa: F401  a fixture

from launch import training_memory
from launch.__main__ import main
from launch.training_memory import BYTES_A_TOKEN, check_step_fits
from launch.training_recipe import Recipe
from tp.errors import CapacityError
from tp.models import CausalLM
from tp.parallel import TensorParallelGroup
from tp.training.groups import TrainingGroups

CONFIG = make_config(num_attention_heads=6, num_kv_heads=3, head_dim=16)
MIB = 2**20


def check(group: TensorParallelGroup, free: list[int], rows: int = 60, micro: int | None = None, **options) -> None:
    """Of `rows` rows of 64 tokens, where each rank has this many bytes free."""
    given = {"micro_batch_size": micro, "dp": 1, "sequence_parallel": "auto", "activation_checkpointing": False}
    recipe = Recipe(sequence_length=64, batch_size=rows)
    groups = TrainingGroups.of(group)
    with mock.patch.object(training_memory, "free_memory", lambda group: free[group.rank]):
        check_step_fits(Namespace(**given | options), recipe, CONFIG, groups, torch.float32)


def refusal(group: TensorParallelGroup, free: list[int], rows: int = 60, micro: int | None = None, **options) -> str:
    with pytest.raises(CapacityError) as raised:
        check(group, free, rows, micro, **options)
    return str(raised.value)


def test_the_rows_at_once_that_fit_are_told() -> None:
    alone = TensorParallelGroup.alone()
    parameters = 3 * sum(weight.nbytes for weight in CausalLM(CONFIG, dtype=torch.float32).parameters())
    free = [parameters + BYTES_A_TOKEN * 60 * 64 + 8 * MIB]
    said = refusal(alone, free)
    assert f"{parameters / MIB:,.1f} MiB for parameters" in said and "60 x 64 tokens at once" in said
    fits = int(re.search("there is room for --micro-batch-size ([0-9]+)$", said).group(1))
    assert 60 % fits == 0 and fits > 1
    check(alone, free, micro=fits)
    following = next(rows for rows in range(fits + 1, 61) if 60 % rows == 0)
    refusal(alone, free, micro=following)
    check(alone, free, micro=following, activation_checkpointing=True)


@pytest.mark.parametrize("free", [0, 1000, MIB])
def test_where_no_row_fits_other_things_are_told(free: int) -> None:
    said = refusal(TensorParallelGroup.alone(), [free])
    assert said.endswith(
        "is free: use more ranks, --activation-checkpointing, or a smaller --batch-size or --sequence-length"
    )


def test_the_tokens_of_a_step_count_however_few_are_trained_on_at_once() -> None:
    alone, room = TensorParallelGroup.alone(), [500 * MIB]
    check(alone, room, rows=200_000, micro=1)
    assert "smaller --batch-size" in refusal(alone, room, rows=400_000, micro=1)


def _told(group: TensorParallelGroup, free: list[int]) -> str:
    return refusal(group, free)


def test_one_rank_without_room_refuses_for_all(ranks: RankPool) -> None:
    first, second = ranks(2).run(_told, [2**40, 3 * MIB])
    assert first == second and first.startswith("rank 1 needs ")


@pytest.mark.parametrize(
    "options, status, message",
    [
        (["--batch-size", "100000000"], 5, "MiB for gradients and activations of 100000000 x 16 tokens at once"),
        (["--batch-size", "100000000", "--activation-checkpointing"], 5, "of 100000000 x 16 tokens at once"),
        (["--batch-size", "1000000", "--micro-batch-size", "10"], 2, "is 16000000 tokens a step, more than 1000 times"),
    ],
)
def test_a_step_that_cannot_be_is_refused_before_it_is_packed(
    options: list[str],
    status: int,
    message: str,
    inputs: Path,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with mock.patch.object(training_memory, "free_memory", return_value=16 * 2**30):
        assert main(train_options(inputs, tmp_path / "run", "--tp", "1", *options)) == status
    err = capfd.readouterr().err
    assert err.startswith("error: ") and message in err and err.count("\n") == 1
