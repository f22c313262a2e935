"""Which form of an operation runs."""

from __future__ import annotations

import pytest
import torch

from tp import choice
from tp.kernels.rms_norm import rms_norm
from tp.kernels.triton.use import uses_triton


def test_kernels_are_used_in_their_dtypes_and_unless_switched_off(device, monkeypatch):
    monkeypatch.setattr(choice, "_disabled", choice._disabled)
    assert uses_triton("rms_norm", torch.empty(1, device=device))
    assert not uses_triton("rms_norm", torch.empty(1, dtype=torch.float64, device=device))
    choice.disable("native, silu_and_mul, rms_norm")
    assert not uses_triton("rms_norm", torch.empty(1, device=device))
    assert uses_triton("fused_add_rms_norm", torch.empty(1, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_either_form_takes_the_statistics_of_the_other(device, dtype, monkeypatch):
    monkeypatch.setattr(choice, "_disabled", choice._disabled)
    x = torch.tensor([3.0, 4.0], dtype=dtype, device=device, requires_grad=True)
    y = rms_norm(x, torch.ones(2, device=device), 0.0)
    choice.disable("native, rms_norm")
    y.sum().backward()
    assert x.grad.tolist() == pytest.approx([0.032 * 2**0.5, -0.024 * 2**0.5], abs=1e-6)
