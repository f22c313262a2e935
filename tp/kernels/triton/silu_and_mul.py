"""SiLU(gate) · up in Triton, forward and backward."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp.kernels.triton.rows import SEPARATE_ROUNDINGS, on_device_of, readable_rows
from tp.parallel.partition import ceil_div

_BLOCK = 1024


def silu_and_mul_forward(gate_up: Tensor) -> Tensor:
    """y = cast(SiLU(gate)) · up.

    Args:
        gate_up: [..., 2·I], gate in the first half, up in the second.

    Returns:
        [..., I], contiguous.
    """
    rows = readable_rows(gate_up)
    num_rows, width = rows.shape[0], rows.shape[1] // 2
    y = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        with on_device_of(gate_up):
            _forward_kernel[(num_rows, ceil_div(width, _BLOCK))](
                rows, y, rows.stride(0), width, BLOCK=_BLOCK, **SEPARATE_ROUNDINGS
            )
    return y


def silu_and_mul_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """d(gate | up), where `dy` is only read.

    With s = sigmoid(gate): dgate = cast(dy · up) · s · (1 + gate · (1 − s)); dup = dy · cast(gate · s).

    Returns:
        [..., 2·I], contiguous.
    """
    rows, dy_rows = readable_rows(gate_up), readable_rows(dy)
    num_rows, width = dy_rows.shape
    d_gate_up = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    if dy.numel():
        with on_device_of(gate_up):
            _backward_kernel[(num_rows, ceil_div(width, _BLOCK))](
                dy_rows, rows, d_gate_up, dy_rows.stride(0), rows.stride(0), width, BLOCK=_BLOCK, **SEPARATE_ROUNDINGS
            )
    return d_gate_up


@triton.jit
def _forward_kernel(gate_up, y, gate_up_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    dtype = y.dtype.element_ty
    gate = tl.load(gate_up + row * gate_up_stride + columns, mask=inside, other=0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + width + columns, mask=inside, other=0).to(tl.float32)
    activated = tl.div_rn(gate, 1 + tl.exp(-gate)).to(dtype).to(tl.float32)
    tl.store(y + row * width + columns, (activated * up).to(dtype), mask=inside)


@triton.jit
def _backward_kernel(dy, gate_up, d_gate_up, dy_stride, gate_up_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    dtype = d_gate_up.dtype.element_ty
    gate = tl.load(gate_up + row * gate_up_stride + columns, mask=inside, other=0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + width + columns, mask=inside, other=0).to(tl.float32)
    upstream = tl.load(dy + row * dy_stride + columns, mask=inside, other=0).to(tl.float32)
    denominator = 1 + tl.exp(-gate)
    sigmoid = tl.div_rn(1.0, denominator)
    activated = tl.div_rn(gate, denominator).to(dtype).to(tl.float32)
    d_activated = (upstream * up).to(dtype).to(tl.float32)
    d_gate = d_activated * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(d_gate_up + row * (2 * width) + columns, d_gate.to(dtype), mask=inside)
    tl.store(d_gate_up + row * (2 * width) + width + columns, (upstream * activated).to(dtype), mask=inside)
