"""The pool of ranks itself: right results in rank order, and a failing rank ends a call at once."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch
from pool import RankDiedError, RankPool, RankTimeoutError

from tp.errors import ConfigError
from tp.parallel import TensorParallelGroup
from tp.parallel.mappings import copy_to_tensor_parallel_region


def _weighted_sum(group: TensorParallelGroup, scale: float, *, offset: float = 0.0) -> tuple[int, torch.Tensor]:
    value = torch.tensor([scale * 10.0**group.rank + offset], device=group.device)
    return group.rank, group.communicator.all_reduce(value)


@pytest.mark.parametrize("t", [1, 2, 3, 4, 5])
def test_results_come_in_rank_order_at_every_degree(ranks: RankPool, t: int) -> None:
    results = ranks(t).run(_weighted_sum, 2.0, offset=1.0)
    assert [rank for rank, _ in results] == list(range(t))
    expected = sum(2.0 * 10.0**rank + 1.0 for rank in range(t))
    assert all(total.item() == expected for _, total in results)


def _disturb_and_draw(group: TensorParallelGroup) -> tuple[int, float, float, int, bool, str | None]:
    calls = group.communicator.statistics.calls
    drawn = random.random(), torch.rand(1).item()
    found = os.environ.get("LEFT_BY_AN_EARLIER_CALL")
    grad = torch.is_grad_enabled()
    os.environ["LEFT_BY_AN_EARLIER_CALL"] = "yes"
    torch.set_grad_enabled(False)
    group.communicator.all_reduce(torch.ones(1, device=group.device))
    return os.getpid(), *drawn, calls, grad, found


def test_calls_do_not_see_each_other_and_share_processes(ranks: RankPool) -> None:
    first, second = (ranks(2).run(_disturb_and_draw) for _ in range(2))
    assert first == second
    assert first[0][3:] == (0, True, None)


def _fail_after_a_collective(group: TensorParallelGroup, how: str, failing: int) -> None:
    group.communicator.all_reduce(torch.ones(3, device=group.device))
    if group.rank == failing and how == "raise":
        raise ConfigError("boom on purpose")
    if group.rank == failing and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == failing and how == "sleep":
        time.sleep(600)
    group.communicator.all_reduce(torch.ones(5, device=group.device))


def test_a_rank_that_raises_is_raised_here_at_once(ranks: RankPool) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match="^boom on purpose$") as caught:
        ranks(3).run(_fail_after_a_collective, "raise", 1)
    assert time.monotonic() - began < 5
    assert caught.value.rank == 1  # type: ignore[attr-defined]
    assert "in _fail_after_a_collective" in str(caught.value.__cause__)
    assert ranks(3).run(_weighted_sum, 1.0)[2][1].item() == 111.0


def test_a_rank_that_is_killed_is_named_at_once(ranks: RankPool) -> None:
    ranks(3).run(_weighted_sum, 1.0)
    began = time.monotonic()
    with pytest.raises(RankDiedError, match="^rank 2 was killed by SIGKILL$"):
        ranks(3).run(_fail_after_a_collective, "kill", 2)
    assert time.monotonic() - began < 5
    assert ranks(2).run(_weighted_sum, 1.0)[1][1].item() == 11.0


def test_a_rank_that_hangs_ends_with_a_timeout(ranks: RankPool) -> None:
    ranks(2).run(_weighted_sum, 1.0)
    with pytest.raises(RankTimeoutError, match=r"ranks \[0, 1\] of 2"):
        ranks(2).run(_fail_after_a_collective, "sleep", 0, timeout_s=0.5)


def _raise_everywhere(group: TensorParallelGroup) -> None:
    raise ConfigError(f"seen on all, said by {group.rank}")


def _process_id(group: TensorParallelGroup) -> int:
    return os.getpid()


def test_an_error_of_all_ranks_keeps_the_workers(ranks: RankPool) -> None:
    before = ranks(2).run(_process_id)
    with pytest.raises(ConfigError, match="seen on all"):
        ranks(2).run(_raise_everywhere)
    assert ranks(2).run(_process_id) == before


def _assert_wrong(group: TensorParallelGroup) -> None:
    left = 40 + group.rank
    assert left == 42


def _returns_a_lambda(group: TensorParallelGroup) -> object:
    return lambda: group


def test_what_a_rank_reports_is_readable(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match="assert 40 == 42"):
        ranks(1).run(_assert_wrong)
    with pytest.raises(TypeError, match="result of a rank cannot be sent"):
        ranks(1).run(_returns_a_lambda)


def _view_of_a_large_tensor(group: TensorParallelGroup) -> torch.Tensor:
    return torch.arange(100.0, requires_grad=True)[3:5] * 2 if group.rank else torch.arange(1000.0)[3:5]


def test_tensors_come_back_by_value(ranks: RankPool) -> None:
    first, second = ranks(2).run(_view_of_a_large_tensor)
    assert first.tolist() == [3.0, 4.0] and first.untyped_storage().nbytes() == 8
    assert second.tolist() == [6.0, 8.0] and not second.requires_grad


def _fail_below(group: TensorParallelGroup, where: str) -> None:
    def boom(*_: object) -> None:
        if group.rank == 1:
            raise ValueError(f"boom in {where}")

    layer = torch.nn.Linear(3, 2, device=group.device)
    if where == "hook":
        layer.register_forward_hook(boom)
    x = torch.ones(1, 3, device=group.device, requires_grad=True)
    if where == "backward":
        x.register_hook(boom)
    copy_to_tensor_parallel_region(layer(copy_to_tensor_parallel_region(x, group)), group).sum().backward()
    group.communicator.all_reduce(torch.ones(1, device=group.device))


@pytest.mark.parametrize("where", ["hook", "backward"])
def test_a_rank_that_raises_inside_torch_is_no_different(ranks: RankPool, where: str) -> None:
    with pytest.raises(ValueError, match=f"^boom in {where}$") as caught:
        ranks(2).run(_fail_below, where, timeout_s=20)
    assert caught.value.rank == 1  # type: ignore[attr-defined]
