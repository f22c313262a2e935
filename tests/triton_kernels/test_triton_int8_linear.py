"""Linears with int8 weights: against float64, over all shapes of tiles, splits, strides, and rows far apart."""

from __future__ import annotations

import pytest
import torch
from bounds import DTYPES

from tp import choice
from tp.kernels import linear as linear_module
from tp.kernels.int8_weight import Int8Weight
from tp.kernels.linear import linear
from tp.kernels.triton import int8_linear as kernels
from tp.kernels.triton.int8_linear import Tiles, int8_linear

ROWS = [0, 1, 2, 3, 17, 33, 70]


def _case(device, dtype, rows, out_features, in_features):
    """x, values, scales and a bias that weighs as much as the product."""
    x = torch.randn(rows, in_features)
    values = torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8)
    scales = 0.01 * (0.5 + torch.rand(out_features))
    bias = in_features**0.5 * torch.randn(out_features)
    return x.to(device, dtype), values.to(device), scales.to(device), bias.to(device, dtype)


def _assert_rounded_once(y, x, values, scales, bias=None):
    """Half a unit of its dtype, and what float32 sums may lose: of the products' magnitudes, never of their square."""
    weight = values.double() * scales.double().unsqueeze(1)
    exact, size = x.double() @ weight.t(), x.double().abs() @ weight.abs().t()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    assert y.dtype == x.dtype and y.is_contiguous()
    assert ((y.double() - exact).abs() <= torch.finfo(x.dtype).eps / 2 * exact.abs() + 3e-7 * size).all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_odd_sizes(device, dtype, rows):
    x, values, scales, bias = _case(device, dtype, rows, 77, 277)
    for given in (None, bias):
        y = int8_linear(x, values, scales, given)
        assert y.shape == (rows, 77)
        _assert_rounded_once(y, x, values, scales, given)


@pytest.mark.parametrize("out_features, in_features", [(1, 1), (3, 16), (128, 256), (260, 2051)], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 40, 130])
def test_products_of_other_sizes(device, rows, out_features, in_features):
    case = _case(device, torch.bfloat16, rows, out_features, in_features)
    _assert_rounded_once(int8_linear(*case), *case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_groups_of_tiles(device, dtype):
    """More than 8 tiles of rows, the last group smaller, and several of outputs."""
    rows = 9 * Tiles.of(1000, 1, dtype).rows + 5
    case = _case(device, dtype, rows, 300, 40)
    _assert_rounded_once(int8_linear(*case), *case)


@pytest.mark.parametrize(
    "dtype, rows", [(torch.bfloat16, 2), (torch.bfloat16, 70), (torch.float16, 33), (torch.float32, 2)], ids=str
)
def test_programs_that_share_columns(device, dtype, rows, monkeypatch):
    """601 columns between 2 to 4 programs, of which the last has fewer."""
    x, values, scales, bias = _case(device, dtype, rows, 130, 601)
    for columns, shares in ((150, (160, 192, 256)), (300, (304, 320, 384, 512))):
        monkeypatch.setattr(kernels, "_SPLIT_COLUMNS", columns)
        assert Tiles.of(rows, 130, dtype).share(rows, 130, 601) in shares
        for given in (None, bias):
            _assert_rounded_once(int8_linear(x, values, scales, given), x, values, scales, given)


def test_shapes_alone_decide_how_columns_are_shared():
    tiles = Tiles.of(8, 3584, torch.bfloat16)
    shapes = (3584, 3584), (3584, 18944), (37888, 18944), (16, 41000)
    assert [tiles.share(8, *shape) for shape in shapes] == [3584, 9472, 18944, 4352]
    assert Tiles.of(8, 37888, torch.bfloat16).outputs > tiles.outputs


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_of_any_strides_equal_contiguous_ones(device, dtype, rows):
    x, values, scales, bias = _case(device, dtype, rows, 50, 40)
    expected = int8_linear(x, values, scales, bias)
    wide = torch.cat([x, x], dim=1)[:, :40]
    transposed = x.t().contiguous().t()
    strided = values.t().contiguous().t(), scales.repeat_interleave(2)[::2], bias.repeat_interleave(2)[::2]
    assert torch.equal(int8_linear(wide, torch.cat([values, values], 1)[:, 40:], scales, bias), expected)
    assert torch.equal(int8_linear(transposed, *strided), expected)
    assert torch.equal(int8_linear(x.view(1, rows, 1, 40), values, scales, bias), expected.view(1, rows, 1, 50))


def test_the_sum_is_scaled_before_it_is_rounded(device):
    """257 is 256 in bfloat16, and 1024 · 257 overflows float16: rounded before the scale they would stay so."""
    x, values = torch.ones(2, 257, device=device), torch.ones(1, 257, dtype=torch.int8, device=device)
    third = torch.full((1,), 1 / 3, device=device)
    for rows in (1, 2):
        y = int8_linear(x[:rows].bfloat16(), values, third, None)
        assert y.tolist() == [[torch.tensor(257 / 3).bfloat16().item()]] * rows
        y = int8_linear((1024 * x[:rows]).half(), values, third / 1024, None)
        assert y.tolist() == [[torch.tensor(257 / 3).half().item()]] * rows


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_what_is_not_finite_stays_in_its_row_or_output(device, rows, value):
    x, values, scales, bias = _case(device, torch.bfloat16, rows, 50, 40)
    x[rows // 2, 7] = value
    y = int8_linear(x, values, scales, bias)
    assert not y[rows // 2].isfinite().any()
    assert y.isfinite().all(1).sum() == rows - 1
    scales[3] = value
    assert int8_linear(x, values, scales, bias).isfinite().any(0).logical_not().nonzero().flatten().tolist() == (
        [3] if rows > 1 else list(range(50))
    )


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_and_weights_past_two_to_the_31(device, distant, rows):
    """The third row of x is there, and that of the weights, 2^30 + 16 bytes apart."""
    x, values, scales, bias = _case(device, torch.bfloat16, 3, 3, 20)
    near = int8_linear(x[:rows], values, scales, bias)
    place = distant(torch.zeros(3, 16, dtype=torch.bfloat16)).view(torch.int8)
    far_values = place.as_strided((3, 20), (place.stride(0) // 2, 1)).copy_(values)
    assert far_values.stride(0) < 2**31 < 2 * far_values.stride(0)
    assert torch.equal(int8_linear(distant(x)[:rows], far_values, scales, bias), near)


@pytest.mark.parametrize("rows", [1, 40])
def test_linear_takes_the_kernel_unless_it_is_switched_off(device, rows, monkeypatch):
    monkeypatch.setattr(choice, "_disabled", choice._disabled)
    weight = torch.randn(50, 40, device=device)
    int8 = Int8Weight(weight, weight.abs().amax(1))
    x, bias = torch.randn(2, rows, 40, device=device), torch.randn(50, device=device)
    calls = []
    monkeypatch.setattr(kernels, "int8_linear", lambda *arguments: calls.append(1) or int8_linear(*arguments))
    y = linear(x, int8, bias)
    assert calls == [1] and y.shape == (2, rows, 50)
    choice.disable("native, int8_linear")
    torch.testing.assert_close(linear(x, int8, bias), y, rtol=1e-5, atol=1e-4)
    assert calls == [1]


@pytest.mark.parametrize("rows", [1, 40])
def test_without_columns_there_is_the_bias(device, rows):
    int8, bias = Int8Weight(torch.ones(5, 0, device=device), torch.zeros(5, device=device)), torch.randn(5).to(device)
    assert torch.equal(linear(torch.ones(rows, 0, device=device), int8, bias), bias.expand(rows, 5))


def test_what_torch_refuses_is_refused(device):
    int8 = Int8Weight(torch.ones(5, 4, device=device), torch.ones(5, device=device))
    for x, bias in ((torch.ones(3, 8), None), (torch.ones(3, 6), None), (torch.ones(3, 4), torch.ones(4))):
        with pytest.raises(RuntimeError):
            linear_module.linear(x.to(device), int8, None if bias is None else bias.to(device))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: a CUDA graph")
@pytest.mark.parametrize("rows", [1, 8])
def test_a_captured_graph_serves_other_values(device, rows):
    x, values, scales, bias = _case(device, torch.bfloat16, rows, 300, 9000)
    int8_linear(x, values, scales, bias)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = int8_linear(x, values, scales, bias)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(captured, int8_linear(x, values, scales, bias))
