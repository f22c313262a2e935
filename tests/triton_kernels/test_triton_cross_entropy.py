"""A vocabulary split over ranks: statistics and gradients of every shard against torch's cross-entropy."""

from __future__ import annotations

import pytest
import torch
from bounds import DTYPES
from torch.nn import functional

from tp.kernels.cross_entropy import shard_gradient, shard_statistics
from tp.kernels.triton import cross_entropy as kernels
from tp.layers import ShardedLogits
from tp.parallel import TensorParallelGroup
from tp.training import vocab_parallel_cross_entropy

VOCAB, COLUMNS = 97, 40
"""Three shards of 40 columns: the last has 17 real ones; a fourth has none."""
IGNORED = -100


def _shards(whole, labels):
    """(columns, targets, num_valid) of each rank; padding columns are not numbers."""
    for rank in range(4):
        start, stop = min(VOCAB, rank * COLUMNS), min(VOCAB, (rank + 1) * COLUMNS)
        columns = whole.new_full((len(whole), COLUMNS), torch.nan)
        columns[:, : stop - start] = whole[:, start:stop]
        yield columns, labels - start, stop - start


def _loss_and_gradient(whole, labels, smoothing):
    shards = list(_shards(whole, labels))
    maxima, sums, targets, totals = torch.stack([shard_statistics(*shard) for shard in shards]).unbind(1)
    top = maxima.amax(0)
    log_sum = (sums * (maxima - top).exp()).sum(0).log()
    nll = log_sum - (targets.sum(0) - top)
    smooth = log_sum - (totals.sum(0) / VOCAB - top)
    valid = labels != IGNORED
    loss = ((1 - smoothing) * nll + smoothing * smooth).where(valid, 0).sum()
    gradients = [shard_gradient(*shard, top, log_sum, valid, smoothing, VOCAB) for shard in shards]
    return loss, gradients


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loss_and_gradient_are_torchs(device, dtype, smoothing, monkeypatch):
    monkeypatch.setattr(kernels, "_BLOCK", 16)  # several chunks a row
    whole = (20 * torch.randn(5, VOCAB) - 60).to(device=device, dtype=dtype)
    labels = torch.tensor([0, 39, IGNORED, 40, 96], device=device)
    before = whole.clone()
    loss, gradients = _loss_and_gradient(whole, labels, smoothing)
    reference = whole.double().requires_grad_()
    expected = functional.cross_entropy(
        reference, labels, ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum"
    )
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradient = torch.cat(gradients, dim=1)[:, : 4 * COLUMNS]
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient[:, :VOCAB].double(), reference.grad, rtol=torch.finfo(dtype).eps, atol=2e-7)
    assert torch.count_nonzero(gradient[:, VOCAB:]) == 0
    assert torch.count_nonzero(gradient[2]) == 0
    assert torch.equal(whole, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_training_loss_is_made_of_the_kernels(device, dtype):
    logits = (3 * torch.randn(6, VOCAB)).to(device=device, dtype=dtype).requires_grad_()
    labels = torch.tensor([0, 39, IGNORED, 40, 96, IGNORED], device=device)
    reference = logits.detach().double().requires_grad_()
    loss = vocab_parallel_cross_entropy(ShardedLogits(logits, TensorParallelGroup.alone(device), VOCAB), labels)
    expected = functional.cross_entropy(reference, labels)
    (loss * 4).backward()
    (expected * 4).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(logits.grad.double(), reference.grad, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_an_ignored_row_without_numbers_has_no_gradient(device):
    whole = torch.full((1, VOCAB), torch.nan, device=device)
    _, gradients = _loss_and_gradient(whole, torch.tensor([IGNORED], device=device), 0.1)
    assert torch.count_nonzero(torch.cat(gradients)) == 0


def test_a_rank_without_columns_gives_finite_numbers(device):
    statistics = shard_statistics(torch.full((2, 3), torch.nan, device=device), torch.tensor([0, 7], device=device), 0)
    assert statistics.tolist() == [[torch.finfo(torch.float32).min] * 2] + [[0.0] * 2] * 3


def test_no_tokens(device):
    nothing = torch.empty(0, COLUMNS, device=device)
    labels, rows = torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, device=device)
    assert shard_statistics(nothing, labels, 37).shape == (4, 0)
    assert shard_gradient(nothing, labels, 37, rows, rows, rows.bool(), 0.0, VOCAB).shape == (0, COLUMNS)


def test_rows_of_any_stride_and_past_two_to_the_31(device, distant):
    near = torch.randn(3, COLUMNS, dtype=torch.float32).to(device, torch.bfloat16)
    targets = torch.tensor([0, -5, 36], device=device)
    statistics = shard_statistics(near, targets, 37)
    top, log_sum, valid = statistics[0], statistics[1].log(), torch.ones(3, dtype=torch.bool, device=device)
    gradient = shard_gradient(near, targets, 37, top, log_sum, valid, 0.1, VOCAB)
    for other in (distant(near), near.t().contiguous().t(), near.repeat(1, 2)[:, :COLUMNS]):
        assert torch.equal(shard_statistics(other, targets, 37), statistics)
        assert torch.equal(shard_gradient(other, targets, 37, top, log_sum, valid, 0.1, VOCAB), gradient)
