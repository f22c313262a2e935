"""Applying the rotary embedding (Su et al. 2021, arXiv:2104.09864) to queries and keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tp.kernels.triton.use import uses_triton
from tp.native.library import ADDRESS, FLOAT, INTEGER
from tp.native.operation import NativeOperation

_NATIVE = NativeOperation("rotary", "tp_cos_and_sin", ADDRESS, INTEGER, ADDRESS, INTEGER, FLOAT, ADDRESS, ADDRESS)


def cos_and_sin(positions: Tensor, frequencies: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of positions × frequencies, times `scaling`; angles and scaling in float32, then cast; each [N, d].

    Args:
        positions: [N] int64.
        frequencies: [d/2] float32, or [N, d/2] where they depend on the sequence.
        scaling: YaRN's; 1 for other rope types.
    """
    fits = positions.is_cpu and positions.dtype == torch.int64 and positions.is_contiguous() and frequencies.dim() == 1
    if fits and (native := _NATIVE.for_dtype(dtype)) is not None:
        count, half = positions.shape[0], frequencies.shape[0]
        cos, sin = (frequencies.new_empty(count, 2 * half, dtype=dtype) for _ in range(2))
        native(positions.data_ptr(), count, frequencies.data_ptr(), half, scaling, cos.data_ptr(), sin.data_ptr())
        return cos, sin
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """y = x·cos + rotate_half(x)·sin, each product and the sum rounded to x's dtype.

    Args:
        x: [N, H, d] queries or keys.
        cos, sin: [N, 1, d] in x's dtype.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def rotate_queries_and_keys(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rotary` of both, in one launch on CUDA.

    Backward: the same rotation by the opposite angle, with as many roundings. With halves x₁, x₂ of a head,
    y₁ = x₁c₁ − x₂s₁ and y₂ = x₂c₂ + x₁s₂, so that dx₁ = dy₁c₁ + dy₂s₂ and dx₂ = dy₂c₂ − dy₁s₁: what the forward
    makes of dy where sin is −(s₂ | s₁). cos and sin get no gradient.

    Args:
        q, k: [N, H, d] and [N, H', d] of one dtype, possibly views of one fused tensor; only read.
        cos, sin: [N, 1, d] in their dtype.
    """
    if not uses_triton("rotary", q):
        return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        rotated: tuple[Tensor, Tensor] = _Rotation.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]
        return rotated
    return _rotate(q, k, cos, sin)


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from tp.kernels.triton.rotary import rotate

    return rotate(q, k, cos, sin)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotate(q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        opposite = -sin.roll(sin.shape[-1] // 2, dims=-1)
        return *_rotate(d_q, d_k, cos, opposite), None, None
