"""What a greedy choice needs of its logits: the C++ kernel and the plain form against float64."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from tp.generation.options import GenerationOptions
from tp.generation.sampler import Sampler
from tp.generation.scheduler import SequenceState
from tp.kernels.argmax_and_sum_exp import LOWEST, ArgmaxAndSumExp, argmax_and_sum_exp, plain_argmax_and_sum_exp
from tp.layers.sharded_logits import ShardedLogits
from tp.parallel.group import TensorParallelGroup

Form = Callable[[Tensor], ArgmaxAndSumExp]
FORMS = [argmax_and_sum_exp, plain_argmax_and_sum_exp]
DTYPES = [torch.float32, torch.bfloat16]
PLAIN = "tp.kernels.argmax_and_sum_exp.plain_argmax_and_sum_exp"


def random(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return (4 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cpu_does_it_in_cpp(dtype: torch.dtype) -> None:
    with mock.patch(PLAIN, side_effect=AssertionError("the plain form")):
        argmax_and_sum_exp(random(2, 9, dtype))
        with pytest.raises(AssertionError, match="the plain form"):
            argmax_and_sum_exp(random(2, 9, torch.float16))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("rows, columns", [(0, 7), (1, 1), (3, 31), (2, 33), (9, 1000), (2, 4096), (3, 50001)])
def test_it_is_what_float64_gives(rows: int, columns: int, dtype: torch.dtype, form: Form) -> None:
    wide = random(rows, columns + 3, dtype)
    logits = wide[:, :columns]  # rows are apart
    exact = logits.double()
    found = form(logits)
    assert torch.equal(found.columns, exact.argmax(-1, keepdim=True)) and found.columns.dtype == torch.int64
    assert torch.equal(found.highest.double(), exact.amax(-1, keepdim=True))
    sum_exp = (exact - exact.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)
    torch.testing.assert_close(found.sum_exp.double(), sum_exp, rtol=2e-6, atol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_of_equal_values_the_first_counts_wherever_it_is(dtype: torch.dtype, form: Form) -> None:
    for first in (0, 15, 16, 31, 32, 5000, 8191, 9000):
        logits = random(1, 9001, dtype).clamp(max=8)
        logits[0, first:] = torch.where(logits[0, first:] > 6, 9, logits[0, first:])
        logits[0, first] = logits[0, 9000] = 9
        assert form(logits).columns.item() == first
    zeros = torch.tensor([[-1.0, -0.0, 0.0]], dtype=dtype)
    assert form(zeros).columns.item() == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("columns", [1, 40, 5000])
def test_a_value_that_is_not_finite_shows_wherever_it_is(
    columns: int, bad: float, dtype: torch.dtype, form: Form
) -> None:
    for at in {0, columns // 2, columns - 1}:
        logits = random(3, columns, dtype)
        logits[1, at] = bad
        found = form(logits)
        assert found.sum_exp.isfinite().flatten().tolist() == [True, False, True]
        assert 0 <= found.columns[1].item() < columns


@pytest.mark.parametrize("form", FORMS)
def test_far_apart_values(form: Form) -> None:
    found = form(torch.tensor([[3e38, -3e38, 3e38], [-3e38, -3e38, -3e38], [-1e-3, 0.0, 88.0]]))
    assert found.columns.flatten().tolist() == [0, 0, 2]
    torch.testing.assert_close(found.sum_exp.flatten(), torch.tensor([2.0, 3.0, 1.0]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_columns(dtype: torch.dtype, form: Form) -> None:
    found = form(torch.empty(2, 0, dtype=dtype))
    assert found.columns.tolist() == [[0], [0]] and found.sum_exp.tolist() == [[0], [0]]
    assert found.highest.tolist() == [[LOWEST], [LOWEST]]


def test_a_choice_that_nothing_alters_does_not_sort_or_widen_the_logits() -> None:
    group, states = TensorParallelGroup.alone(), [SequenceState(0, (1, 2))]
    logits = ShardedLogits(random(1, 50, torch.bfloat16), group, 50)
    with mock.patch.object(Sampler, "_best_columns", side_effect=AssertionError("all columns")):
        for options in (GenerationOptions(), GenerationOptions(min_new_tokens=2, ignore_eos=True)):
            sampler = Sampler(options, (), 50)
            ((token, logprob),) = sampler.choose(sampler.candidates(logits, states), states)
            assert token == logits.local.argmax().item()
            assert logprob == pytest.approx(logits.local.float().log_softmax(-1)[0, token].item(), abs=1e-5)
        with pytest.raises(AssertionError, match="all columns"):
            Sampler(GenerationOptions(min_new_tokens=2), (7,), 50).candidates(logits, states)
