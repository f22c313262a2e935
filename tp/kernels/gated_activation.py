"""The gate of a gated MLP: activation(gate) · up (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor
from torch.nn import functional

ACTIVATION_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


def activation_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """y = activation(gate) · up, the activation rounded to the dtype before the product.

    Args:
        gate_up: [..., 2·I], gate in the first half, up in the second.
        activation: a key of `ACTIVATION_FUNCTIONS`.

    Returns:
        [..., I]
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATION_FUNCTIONS[activation](gate) * up
