"""The gate of a gated MLP: activation(gate) · up (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tp.kernels.triton.use import uses_triton
from tp.native.library import ADDRESS, INTEGER, THREADS, NativeFunction
from tp.native.operation import NativeOperation

ACTIVATION_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}
_NATIVE = NativeOperation("silu_and_mul", "tp_silu_and_mul", ADDRESS, INTEGER, ADDRESS, INTEGER, INTEGER, THREADS)


def activation_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """y = f(gate) · up, f(gate) rounded to the dtype before the product.

    Backward: dgate = dy · up · f′(gate), dup = dy · f(gate). Only gate_up is saved; f(gate) is computed again.
    SiLU on CUDA is a Triton kernel, both ways, and its forward on a CPU C++; they differ from the plain form
    where the exponential does.

    Args:
        gate_up: [..., 2·I], gate in the first half, up in the second.
        activation: a key of `ACTIVATION_FUNCTIONS`.

    Returns:
        [..., I]
    """
    if torch.is_grad_enabled() and gate_up.requires_grad:
        y: Tensor = _ActivationAndMul.apply(gate_up, activation)  # type: ignore[no-untyped-call]
        return y
    return _forward(gate_up, activation)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """SiLU(gate) · up: `activation_and_mul` with the activation of most models."""
    return activation_and_mul(gate_up, "silu")


def plain_activation_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """`activation_and_mul` in torch operations."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATION_FUNCTIONS[activation](gate) * up


def plain_activation_and_mul_backward(dy: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    """[..., 2·I]: the gradient of gate_up in torch operations."""
    gate, up = gate_up.chunk(2, dim=-1)
    with torch.enable_grad():
        gate = gate.detach().requires_grad_()
        activated = ACTIVATION_FUNCTIONS[activation](gate)
    (d_gate,) = torch.autograd.grad(activated, gate, dy * up)
    return torch.cat([d_gate, dy * activated.detach()], dim=-1)


def _forward(gate_up: Tensor, activation: str) -> Tensor:
    if activation != "silu":
        return plain_activation_and_mul(gate_up, activation)
    if gate_up.is_cpu and gate_up.dim() == 2 and (native := _NATIVE.for_dtype(gate_up.dtype)) is not None:
        return _native_silu_and_mul(native, gate_up)
    if not uses_triton("silu_and_mul", gate_up):
        return plain_activation_and_mul(gate_up, activation)
    from tp.kernels.triton.silu_and_mul import silu_and_mul_forward

    return silu_and_mul_forward(gate_up)


def _backward(dy: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    if activation != "silu" or not uses_triton("silu_and_mul", gate_up):
        return plain_activation_and_mul_backward(dy, gate_up, activation)
    from tp.kernels.triton.silu_and_mul import silu_and_mul_backward

    return silu_and_mul_backward(dy, gate_up)


class _ActivationAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        return _forward(gate_up, activation)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _backward(dy, ctx.saved_tensors[0], ctx.activation), None


def _native_silu_and_mul(native: NativeFunction, gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    y = gate_up.new_empty(rows, width // 2)
    native(gate_up.data_ptr(), gate_up.stride(0), y.data_ptr(), rows, width // 2, torch.get_num_threads())
    return y
