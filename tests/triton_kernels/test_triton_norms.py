"""RMSNorm and fused add + RMSNorm: values, rounding points, strides, far rows, gradients."""

from __future__ import annotations

import pytest
import torch
from bounds import DTYPES, assert_agree, ulps

from tp.errors import AutogradError, LayoutError
from tp.kernels.fused_add_rms_norm import fused_add_rms_norm, plain_fused_add_rms_norm
from tp.kernels.rms_norm import plain_rms_norm, plain_rms_norm_backward, rms_norm
from tp.kernels.triton import rms_norm as kernels
from tp.kernels.triton.rms_norm import rms_norm_backward, rms_norm_forward

WIDTHS = [1, 37, 896, 2051]


def _rows(device, *shape, dtype=torch.float32):
    return (3 * torch.randn(*shape)).to(device=device, dtype=dtype)


def _weight(device, width, dtype):
    return (1 + 0.3 * torch.randn(width)).to(device=device, dtype=dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_is_rounded_before_the_weight_and_its_statistics_are_float32(device, dtype, width):
    x, weight = _rows(device, 5, width, dtype=dtype), _weight(device, width, torch.float32)
    y, reciprocal = rms_norm_forward(x, weight, 1e-5)
    exact = (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert ulps(reciprocal, exact) <= 4
    assert y.dtype == dtype
    assert torch.equal(y, (x.float() * reciprocal).to(dtype) * weight.to(dtype))


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_eps_counts(device, eps):
    x = torch.full((2, 6), 1e-3, device=device)
    expected = plain_rms_norm(x, torch.ones(6, device=device), eps)[0]
    assert ulps(rms_norm(x, torch.ones(6, device=device), eps), expected) <= 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_add_norm_of_three_and_four(device, dtype):
    x = torch.tensor([[1.0, 2.5]], dtype=dtype, device=device)
    residual = torch.tensor([[2.0, 1.5]], dtype=dtype, device=device)
    fused_add_rms_norm(x, residual, torch.ones(2, device=device), 0.0)
    assert residual.tolist() == [[3.0, 4.0]]
    assert ulps(x, torch.tensor([[0.6, 0.8]], dtype=torch.float64, device=device) * 2**0.5) <= 1


def test_norm_of_three_and_four_leaves_its_input_alone(device):
    x = torch.tensor([3.0, 4.0], device=device)
    y = rms_norm(x, torch.ones(2, device=device), 0.0)
    assert y.tolist() == pytest.approx([0.8485281, 1.1313708], abs=2e-7)
    assert x.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("shape", [(5, 1), (3, 2, 37), (3, 896), (1, 16384)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_add_norm_is_the_sequence_of_add_and_norm(device, dtype, shape):
    x, residual = _rows(device, *shape, dtype=dtype), _rows(device, *shape, dtype=dtype)
    weight = _weight(device, shape[-1], dtype)
    expected_x, expected_residual = x.clone(), residual.clone()
    plain_fused_add_rms_norm(expected_x, expected_residual, weight, 1e-6)
    fused_add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, expected_residual)
    assert_agree(x, expected_x)


def _view(kind, storage):
    """[6, 10] views of [6, 40] or so: every way in which strides can surprise."""
    if kind == "every second column":
        return storage[:, 10:30:2]
    if kind == "transposed":
        return storage.view(40, 6)[3:13].t()
    if kind == "split half":
        return storage[:, 7:17]
    return storage.view(12, 20)[:6, :10]


KINDS = ["every second column", "transposed", "split half", "shorter rows"]


@pytest.mark.parametrize("x_kind, residual_kind", [*zip(KINDS, [*KINDS[1:], KINDS[0]], strict=True)])
def test_views_of_any_strides_equal_contiguous_ones_and_nothing_else_is_written(device, x_kind, residual_kind):
    x_storage, residual_storage = _rows(device, 6, 40), _rows(device, 6, 40)
    x_before, residual_before = x_storage.clone(), residual_storage.clone()
    x, residual = _view(x_kind, x_storage), _view(residual_kind, residual_storage)
    weight = _weight(device, 10, torch.float32)
    assert torch.equal(rms_norm(x, weight, 1e-5), rms_norm(x.clone(), weight, 1e-5))
    assert torch.equal(x_storage, x_before)
    expected_x, expected_residual = x.contiguous().clone(), residual.contiguous().clone()
    fused_add_rms_norm(expected_x, expected_residual, weight, 1e-5)
    fused_add_rms_norm(x, residual, weight, 1e-5)
    assert ulps(x, expected_x) <= 4
    assert torch.equal(residual, expected_residual)
    for kind, storage, before in (x_kind, x_storage, x_before), (residual_kind, residual_storage, residual_before):
        _view(kind, storage).copy_(_view(kind, before))
        assert torch.equal(storage, before)


def test_rows_past_two_to_the_31(device, distant):
    x, residual, dy = (_rows(device, 3, 37, dtype=torch.bfloat16) for _ in range(3))
    weight = _weight(device, 37, torch.bfloat16)
    far_x, far_residual, far_dy = distant(x), distant(residual), distant(dy)
    y, reciprocal = rms_norm_forward(x, weight, 1e-5)
    assert torch.equal(rms_norm(far_x, weight, 1e-5), y)
    far_gradients = rms_norm_backward(far_dy, far_x, weight, reciprocal)
    for far, near in zip(far_gradients, rms_norm_backward(dy, x, weight, reciprocal), strict=True):
        assert torch.equal(far, near)
    fused_add_rms_norm(far_x, far_residual, weight, 1e-5)
    fused_add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(far_x, x)
    assert torch.equal(far_residual, residual)


def test_no_rows(device):
    x, weight = torch.empty(0, 7, device=device).requires_grad_(), torch.ones(7, device=device).requires_grad_()
    rms_norm(x, weight, 1e-5).sum().backward()
    assert x.grad.shape == (0, 7)
    assert weight.grad.tolist() == [0] * 7
    with torch.no_grad():
        fused_add_rms_norm(torch.empty(0, 7, device=device), torch.empty(0, 7, device=device), weight, 1e-5)


def test_rows_too_long_for_the_kernel_take_the_plain_form(device):
    x, weight = _rows(device, 2, 16385), _weight(device, 16385, torch.float32)
    with pytest.warns(RuntimeWarning, match="rows of 16385"):
        y = rms_norm(x, weight, 1e-5)
    assert torch.equal(y, plain_rms_norm(x, weight, 1e-5)[0])


@pytest.mark.parametrize("which", ["x", "residual", "weight"])
def test_in_place_is_refused_where_autograd_needs_the_old_values(device, which):
    operands = {name: torch.ones(2, 3, device=device) for name in ("x", "residual")}
    operands["weight"] = torch.ones(3, device=device)
    operands[which].requires_grad_()
    with pytest.raises(AutogradError, match="no_grad"):
        fused_add_rms_norm(**operands, eps=1e-5)
    assert operands["residual"].tolist() == [[1] * 3] * 2


def test_in_place_is_seen_by_a_backward_that_kept_the_old_value(device):
    kept, factor = torch.ones(2, 3, device=device), torch.ones(2, 3, device=device, requires_grad=True)
    y = (kept * factor).sum()
    with torch.no_grad():
        fused_add_rms_norm(torch.ones(2, 3, device=device), kept, torch.ones(3, device=device), 1e-5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_operands_of_different_kinds_are_refused(device):
    x, weight = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    for residual in (torch.ones(3, 3, device=device), x.bfloat16(), x):
        with pytest.raises(LayoutError, match="fused_add_rms_norm"):
            fused_add_rms_norm(x, residual, weight, 1e-5)


@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=["weight like x", "float32 weight"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_those_of_the_formula_and_dy_is_only_read(device, dtype, weight_dtype, monkeypatch):
    monkeypatch.setattr(kernels, "_MAX_PARTIAL_SUMS", 2)  # several tiles a program
    x = _rows(device, 59, 67, dtype=dtype)[::2, :]
    weight = _weight(device, 67, weight_dtype or dtype)
    dy = _rows(device, 67, 30, dtype=dtype).t()
    kept = dy.clone()
    _, reciprocal = rms_norm_forward(x, weight, 1e-5)
    dx, d_weight = rms_norm_backward(dy, x, weight, reciprocal)
    assert torch.equal(dy, kept)
    assert (dx.dtype, d_weight.dtype) == (dtype, weight.dtype)
    expected = plain_rms_norm_backward(dy, x, weight, reciprocal)
    for value, reference in zip((dx, d_weight), expected, strict=True):
        scale = float(reference.abs().max())
        assert float((value - reference).abs().max()) <= (1e-6 if dtype == torch.float32 else 2**-7) * scale
    again = rms_norm_backward(dy, x, weight, reciprocal)
    assert torch.equal(d_weight, again[1])


def test_gradient_of_three_and_four_with_two_consumers(device):
    x = torch.tensor([[3.0, 4.0]], device=device, requires_grad=True)
    weight = torch.ones(2, device=device, requires_grad=True)
    dy = torch.tensor([[1.0, 0.0]], device=device)
    (rms_norm(x, weight, 0.0) + 2 * x).backward(dy)
    assert weight.grad.tolist() == pytest.approx([0.8485281, 0], abs=2e-7)
    assert x.grad.tolist()[0] == pytest.approx([2 + 0.1810193, -0.1357645], abs=1e-6)
    assert dy.tolist() == [[1.0, 0.0]]


def test_weight_gradient_is_summed_in_float32(device):
    """In bfloat16, 256 + 1 stays 256: a sum rounded at every addend stops there; one of 258.015625 loses its end."""
    x, weight = torch.ones(600, 3, dtype=torch.bfloat16, device=device), torch.ones(3, device=device)
    dy = torch.ones_like(x)
    dy[0] = 3.015625
    _, reciprocal = rms_norm_forward(x, weight, 0.0)
    _, d_weight = rms_norm_backward(dy, x, weight, reciprocal)
    assert d_weight.tolist() == [602.015625] * 3
