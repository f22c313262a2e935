"""Sum over ranks + add + norm: the arithmetic of both forms, with the addends of all ranks in this process."""

from __future__ import annotations

import pytest
import torch
from bounds import DTYPES, assert_agree

import tp.kernels.reduce_add_rms_norm as module
from tp.kernels.reduce_add_rms_norm import (
    add_rms_norm,
    plain_add_rms_norm,
    reduce_add_rms_norm,
    reduce_scatter_add_rms_norm,
)
from tp.kernels.triton.reduce_add_rms_norm import reduce_rows
from tp.kernels.triton.symmetric_memory import one_shot, two_shot
from tp.parallel.communicator import Communicator, sum_in_rank_order
from tp.parallel.partition import chunk_ranges
from tp.parallel.symmetric_memory import Addends, SymmetricMemoryCommunicator

EPS = 1e-5


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def _case(device, dtype, ranks, rows, width):
    addends = [(3 * torch.randn(rows, width)).to(device, dtype) for _ in range(ranks)]
    residual = (3 * torch.randn(rows, 2 * width)).to(device, dtype)[:, :width]
    weight, bias = ((1 + 0.3 * torch.randn(width)).to(device, dtype) for _ in range(2))
    return addends, bias, residual, weight


def _addends(tensors, rank=0, wait=lambda: None):
    addresses = torch.tensor([tensor.data_ptr() for tensor in tensors], device=tensors[0].device)
    return Addends(tensors, rank, addresses, wait)


def _expected(addends, bias, residual, weight):
    return plain_add_rms_norm(sum_in_rank_order(addends), bias, residual, weight, EPS)


def _agree(result, expected):
    assert torch.equal(result[0], expected[0])
    assert_agree(result[1], expected[1])


@pytest.mark.parametrize("given", ["nothing", "bias", "residual", "bias and residual"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_norm_leaves_its_operands_alone(device, dtype, given):
    (update,), bias, residual, weight = _case(device, dtype, 1, 5, 37)
    bias, residual = (operand if name in given else None for name, operand in (("bias", bias), ("residual", residual)))
    kept = [operand if operand is None else operand.clone() for operand in (update, bias, residual)]
    result = add_rms_norm(update, bias, residual, weight, EPS)
    for operand, before in zip((update, bias, residual), kept, strict=True):
        assert operand is before or torch.equal(operand, before)
    _agree(result, plain_add_rms_norm(update, bias, residual, weight, EPS))


@pytest.mark.parametrize("given", ["nothing", "bias and residual"])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_shot_has_the_rounding_points_of_the_sequence(device, dtype, ranks, given):
    addends, bias, residual, weight = _case(device, dtype, ranks, 5, 37)
    if given == "nothing":
        bias = residual = None
    result = one_shot(_addends(addends), range(5), bias, residual, weight, EPS)
    _agree(result, _expected(addends, bias, residual, weight))


@pytest.mark.parametrize("rows", [1, 4, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_shots_are_one_shot(device, dtype, rows):
    """What the other ranks do before their wait is done in that of rank 0."""
    tensors, bias, residual, weight = _case(device, dtype, 3, rows, 37)
    expected = _expected(tensors, bias, residual, weight)

    def others() -> None:
        for rank in (1, 2):
            reduce_rows(addends.addresses, tensors[rank], chunk_ranges(rows, 3)[rank], bias)

    addends = _addends(tensors, 0, others)
    _agree(two_shot(addends, bias, residual, weight, EPS), expected)


def test_shares_of_a_stream_that_is_sharded_by_tokens(device):
    addends, bias, residual, weight = _case(device, torch.bfloat16, 3, 7, 37)
    expected = _expected(addends, bias, residual, weight)
    shares = [
        one_shot(_addends(addends), rows, bias, residual[rows.start : rows.stop], weight, EPS)
        for rows in chunk_ranges(7, 3)
    ]
    _agree([torch.cat(parts) for parts in zip(*shares, strict=True)], expected)


class PlayedCommunicator(SymmetricMemoryCommunicator):
    """Rank 1 of three, the addends of all of which are at hand."""

    def __init__(self, addends, one_shot):
        Communicator.__init__(self, 1, 3)
        self._capacity = addends.own.nbytes
        self.addends = addends
        self.one_shot = one_shot

    def in_one_shot(self, tensor):
        return self.one_shot

    def with_addends(self, tensor, finish):
        assert tensor is self.addends.own
        return finish(self.addends)


@pytest.mark.parametrize("form", ["one shot", "two shots", "own rows"])
def test_a_group_with_symmetric_memory_ends_its_sums_in_a_norm(device, form, monkeypatch):
    monkeypatch.setattr(module, "uses_row_kernel", lambda name, tensor: True)
    tensors, bias, residual, weight = _case(device, torch.bfloat16, 3, 7, 37)
    expected = _expected(tensors, bias, residual, weight)

    def others() -> None:
        for rank in (0, 2):
            reduce_rows(addends.addresses, tensors[rank], chunk_ranges(7, 3)[rank], bias)

    addends = _addends(tensors, 1, others)
    communicator = PlayedCommunicator(addends, form == "one shot")
    if form == "own rows":
        result = reduce_scatter_add_rms_norm(communicator, tensors[1], bias, residual[3:5], weight, EPS, [3, 2, 2])
        expected = [whole[3:5] for whole in expected]
    else:
        result = reduce_add_rms_norm(communicator, tensors[1], bias, residual, weight, EPS)
    _agree(result, expected)


def test_the_sum_is_in_rank_order_and_rounded_before_the_residual(device):
    """2^24 + 1 − 2^24 in float32 is 0 in rank order, 1 in another; bfloat16 1 + 2^-9 is 1, whatever the residual."""
    addends = [torch.full((1, 4), value, device=device) for value in (2.0**24, 1.0, -(2.0**24))]
    state, _ = one_shot(_addends(addends), range(1), None, None, torch.ones(4, device=device), EPS)
    assert state.tolist() == [[0.0] * 4]
    addends = [torch.full((1, 8), value, dtype=torch.bfloat16, device=device) for value in (1.0, 2.0**-9)]
    residual = torch.full((1, 8), -1.0, dtype=torch.bfloat16, device=device)
    state, _ = one_shot(_addends(addends), range(1), None, residual, torch.ones(8, device=device), EPS)
    assert state.tolist() == [[0.0] * 8]


def test_rows_past_two_to_the_31_and_none(device, distant):
    addends, bias, residual, weight = _case(device, torch.bfloat16, 2, 3, 37)
    near = one_shot(_addends(addends), range(3), bias, residual, weight, EPS)
    far = one_shot(_addends(addends), range(3), bias, distant(residual), weight, EPS)
    assert torch.equal(torch.stack(far), torch.stack(near))
    far = add_rms_norm(distant(addends[0]), bias, distant(residual), weight, EPS)
    assert torch.equal(torch.stack(far), torch.stack(add_rms_norm(addends[0], bias, residual, weight, EPS)))
    for nothing in one_shot(_addends(addends), range(3, 3), bias, residual[:0], weight, EPS):
        assert nothing.shape == (0, 37)
    for nothing in two_shot(_addends([addend[:0] for addend in addends]), bias, residual[:0], weight, EPS):
        assert nothing.shape == (0, 37)
