"""What the kernels with an RMSNorm share: the tile of a program, the add, and the norm of its rows."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def tile_rows(ROWS: tl.constexpr):
    """[ROWS] int64: the rows of this program. 64 bits, since they are multiplied with strides."""
    return tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)


@triton.jit
def reciprocal_of_rows(wide, width, eps):
    """[ROWS]: r = rsqrt(mean(x²) + eps) of float32 rows; columns past `width` are zeros."""
    return tl.rsqrt(tl.sum(wide * wide, axis=1) / width + eps)


@triton.jit
def normed_rows(wide, reciprocal, weight, dtype: tl.constexpr):
    """[ROWS, BLOCK] in `dtype`: cast(x · r) · cast(w), rounded after each product."""
    normed = (wide * reciprocal[:, None]).to(dtype).to(tl.float32)
    return (normed * weight.to(dtype).to(tl.float32)[None, :]).to(dtype)


@triton.jit
def plus_bias(update, bias, columns, width):
    """cast(u + bias) of a tile; u where there is no bias, which is None."""
    if bias is not None:
        b = tl.load(bias + columns, mask=columns < width, other=0).to(tl.float32)
        update = (update.to(tl.float32) + b[None, :]).to(update.dtype)
    return update


@triton.jit
def settle(update, residual, residual_offsets, weight, state_tile, normed_tile, inside, columns, width, eps):
    """state = cast(residual + u) and normed = RMSNorm(state) · cast(w); residual may be None, or where state goes."""
    state = update
    if residual is not None:
        base = tl.load(residual + residual_offsets, mask=inside, other=0).to(tl.float32)
        state = (base + update.to(tl.float32)).to(update.dtype)
    tl.store(state_tile, state, mask=inside)
    wide = state.to(tl.float32)
    w = tl.load(weight + columns, mask=columns < width, other=0)
    tl.store(normed_tile, normed_rows(wide, reciprocal_of_rows(wide, width, eps), w, update.dtype), mask=inside)
