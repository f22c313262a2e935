"""The rotary embedding of queries and keys in one launch, in Triton."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp.kernels.triton.rows import SEPARATE_ROUNDINGS, next_power_of_two, on_device_of
from tp.parallel.partition import ceil_div

_TILE = 1024


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """x·cos + rotate_half(x)·sin of both, with a rounding at each product and at the sum.

    Args:
        q, k: [N, H, d] and [N, H', d], d even; any strides.
        cos, sin: [N, 1, d] in their dtype.

    Returns:
        the rotated queries and keys, contiguous.
    """
    q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
    num_tokens, q_heads, head_dim = q.shape
    k_heads = k.shape[1]
    rotated_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rotated_k = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    block = next_power_of_two(max(1, head_dim // 2))
    heads = max(1, min(next_power_of_two(max(1, q_heads, k_heads)), _TILE // block))
    q_tiles, k_tiles = ceil_div(q_heads, heads), ceil_div(k_heads, heads)
    if num_tokens and q_tiles + k_tiles:
        with on_device_of(q):
            _kernel[(num_tokens, q_tiles + k_tiles)](
                q, k, cos, sin, rotated_q, rotated_k,
                q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos.stride(0), sin.stride(0),
                q_heads, k_heads, q_tiles, head_dim // 2,
                HEADS=heads, BLOCK=block, num_warps=2, **SEPARATE_ROUNDINGS,
            )  # fmt: skip
    return rotated_q, rotated_k


@triton.jit
def _kernel(
    q, k, cos, sin, rotated_q, rotated_k,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, cos_stride, sin_stride,
    q_heads, k_heads, q_tiles, half, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program rotates some heads of one token: queries in the first `q_tiles` programs, keys in the others."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    cos_row, sin_row = cos + token * cos_stride, sin + token * sin_stride
    if tile < q_tiles:
        heads = tile * HEADS + tl.arange(0, HEADS).to(tl.int64)
        _rotate_heads(
            q + token * q_token_stride, rotated_q + token * q_heads * half * 2, cos_row, sin_row,
            heads, q_heads, q_head_stride, half, BLOCK,
        )  # fmt: skip
    else:
        heads = (tile - q_tiles) * HEADS + tl.arange(0, HEADS).to(tl.int64)
        _rotate_heads(
            k + token * k_token_stride, rotated_k + token * k_heads * half * 2, cos_row, sin_row,
            heads, k_heads, k_head_stride, half, BLOCK,
        )  # fmt: skip


@triton.jit
def _rotate_heads(x, rotated, cos_row, sin_row, heads, num_heads, head_stride, half, BLOCK: tl.constexpr):
    """Heads of one token: x, rotated point at its first head; a half of a head is `half` channels."""
    channels = tl.arange(0, BLOCK)
    within = channels < half
    inside = (heads < num_heads)[:, None] & within[None, :]
    dtype = rotated.dtype.element_ty
    source = x + heads[:, None] * head_stride + channels[None, :]
    first = tl.load(source, mask=inside, other=0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0).to(tl.float32)
    cos_first = tl.load(cos_row + channels, mask=within, other=0).to(tl.float32)[None, :]
    cos_second = tl.load(cos_row + half + channels, mask=within, other=0).to(tl.float32)[None, :]
    sin_first = tl.load(sin_row + channels, mask=within, other=0).to(tl.float32)[None, :]
    sin_second = tl.load(sin_row + half + channels, mask=within, other=0).to(tl.float32)[None, :]
    target = rotated + heads[:, None] * (half * 2) + channels[None, :]
    tl.store(target, _sum_of_products(first, cos_first, -second, sin_first, dtype), mask=inside)
    tl.store(target + half, _sum_of_products(second, cos_second, first, sin_second, dtype), mask=inside)


@triton.jit
def _sum_of_products(a, b, c, d, dtype: tl.constexpr):
    """cast(cast(a·b) + cast(c·d))."""
    return ((a * b).to(dtype).to(tl.float32) + (c * d).to(dtype).to(tl.float32)).to(dtype)
