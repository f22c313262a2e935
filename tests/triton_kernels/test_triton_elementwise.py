"""SiLU · up, and the rotary embedding: rounding points, strides, far rows, gradients."""

from __future__ import annotations

import pytest
import torch
from bounds import DTYPES, ulps

from tp.kernels.gated_activation import (
    activation_and_mul,
    plain_activation_and_mul,
    plain_activation_and_mul_backward,
    silu_and_mul,
)
from tp.kernels.rotary import apply_rotary, rotate_queries_and_keys
from tp.kernels.triton.silu_and_mul import silu_and_mul_backward, silu_and_mul_forward


def _random(device, *shape, dtype=torch.float32):
    return (3 * torch.randn(*shape)).to(device=device, dtype=dtype)


@pytest.mark.parametrize("width", [1, 37, 1027])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_is_rounded_before_the_product(device, dtype, width):
    """float32: 16 ulp, since exponentials of large arguments are so far apart; else one ulp of SiLU, two after · up."""
    gate_up = _random(device, 2, 3, 2 * width, dtype=dtype)
    assert ulps(silu_and_mul(gate_up), plain_activation_and_mul(gate_up, "silu")) <= (16 if dtype == DTYPES[0] else 2)


def test_silu_rounding_is_seen(device):
    """SiLU(1) = 0.7310586 is 0.73046875 in bfloat16; times 1.0078125 that is 0.734375, unrounded 0.73828125."""
    y = silu_and_mul(torch.tensor([[1.0, 1.0078125]], dtype=torch.bfloat16, device=device))
    assert y.item() == (torch.tensor(0.73046875).bfloat16() * torch.tensor(1.0078125).bfloat16()).item()


def test_silu_of_large_numbers_is_finite(device):
    y = silu_and_mul(torch.tensor([[-200.0, 200.0, -90.0, 1.0, 1.0, 1.0]], device=device))
    assert y.tolist()[0] == pytest.approx([0.0, 200.0, 0.0], abs=1e-30)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_gradients_and_dy_only_read(device, dtype):
    gate_up = _random(device, 20, 5, dtype=dtype).t()[:, 3:17]
    dy = _random(device, 7, 5, dtype=dtype).t()
    kept = dy.clone()
    gradient = silu_and_mul_backward(dy, gate_up)
    expected = plain_activation_and_mul_backward(dy, gate_up, "silu")
    # The derivative crosses zero near −1.28: there an ulp of its factors is many of the product.
    assert (gradient - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()
    assert torch.equal(dy, kept)


def test_silu_under_autograd(device):
    gate_up = _random(device, 3, 14).requires_grad_()
    silu_and_mul(gate_up).square().sum().backward()
    reference = gate_up.detach().double().requires_grad_()
    activation_and_mul(reference, "silu").square().sum().backward()
    torch.testing.assert_close(gate_up.grad.double(), reference.grad, rtol=1e-5, atol=1e-5)


def test_silu_of_no_rows(device):
    gate_up = torch.empty(0, 6, device=device, requires_grad=True)
    silu_and_mul(gate_up).sum().backward()
    assert gate_up.grad.shape == (0, 6)


def test_silu_of_rows_past_two_to_the_31(device, distant):
    gate_up, dy = _random(device, 3, 14, dtype=torch.bfloat16), _random(device, 3, 7, dtype=torch.bfloat16)
    far = distant(gate_up)
    assert torch.equal(silu_and_mul_forward(far), silu_and_mul_forward(gate_up))
    assert torch.equal(silu_and_mul_backward(distant(dy), far), silu_and_mul_backward(dy, gate_up))


def _angles(device, tokens, head_dim, dtype):
    """Halves that differ, so that a mix-up of the halves shows."""
    angles = torch.randn(tokens, 1, head_dim)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


@pytest.mark.parametrize("heads, kv_heads, head_dim", [(7, 2, 10), (1, 3, 128), (9, 9, 2)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_has_its_three_roundings_on_views_of_one_tensor(device, dtype, heads, kv_heads, head_dim):
    fused = _random(device, 4, (heads + 2 * kv_heads) * head_dim, dtype=dtype).unflatten(-1, (-1, head_dim))
    before = fused.clone()
    q, k, _ = fused.split([heads, kv_heads, kv_heads], dim=1)
    cos, sin = _angles(device, 4, head_dim, dtype)
    rotated_q, rotated_k = rotate_queries_and_keys(q, k, cos, sin)
    assert torch.equal(rotated_q, apply_rotary(q, cos, sin))
    assert torch.equal(rotated_k, apply_rotary(k, cos, sin))
    assert torch.equal(fused, before)


def test_rotation_of_other_strides_and_of_nothing(device):
    q, k = _random(device, 6, 4, 5).permute(2, 1, 0), _random(device, 5, 2, 12)[:, :, ::2]
    cos, sin = _angles(device, 5, 6, torch.float32)
    rotated_q, rotated_k = rotate_queries_and_keys(q, k, cos, sin)
    assert torch.equal(rotated_q, apply_rotary(q, cos, sin))
    assert torch.equal(rotated_k, apply_rotary(k, cos, sin))
    nothing, keys = rotate_queries_and_keys(q[:, :0], k, cos, sin)
    assert nothing.shape == (5, 0, 6)
    assert torch.equal(keys, rotated_k)
    assert rotate_queries_and_keys(q[:0], k[:0], cos[:0], sin[:0])[1].shape == (0, 2, 6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_gradient_is_that_of_autograd(device, dtype):
    fused = _random(device, 4, 5, 10, dtype=dtype).requires_grad_()
    reference = fused.detach().clone().requires_grad_()
    cos, sin = _angles(device, 4, 10, dtype)
    d_q, d_k = _random(device, 4, 3, 10, dtype=dtype), _random(device, 4, 2, 10, dtype=dtype)
    rotated = rotate_queries_and_keys(fused[:, :3], fused[:, 3:], cos, sin)
    torch.autograd.backward(rotated, (d_q, d_k))
    expected = apply_rotary(reference[:, :3], cos, sin), apply_rotary(reference[:, 3:], cos, sin)
    torch.autograd.backward(expected, (d_q, d_k))
    assert torch.equal(fused.grad, reference.grad)


def test_rotation_past_two_to_the_31(device, distant):
    q, k = _random(device, 3, 3, 6, dtype=torch.bfloat16), _random(device, 3, 2, 6, dtype=torch.bfloat16)
    cos, sin = _angles(device, 3, 6, torch.bfloat16)
    near = rotate_queries_and_keys(q, k, cos, sin)
    far_tokens = rotate_queries_and_keys(distant(q), distant(k), distant(cos), distant(sin))
    far_heads = rotate_queries_and_keys(distant(q.transpose(0, 1)).transpose(0, 1), k, cos, sin)
    assert torch.equal(far_tokens[0], near[0])
    assert torch.equal(far_tokens[1], near[1])
    assert torch.equal(far_heads[0], near[0])
