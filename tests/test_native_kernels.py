"""The C++ kernels against plain torch, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor

from tp import choice
from tp.kernels import linear as linear_module
from tp.kernels import upcast_matmul
from tp.kernels.attention import causal_attention
from tp.kernels.cache_attention import QueryGroups
from tp.kernels.decode_attention import decode_attention, has_decode_attention
from tp.kernels.embedding_lookup import embedding_lookup
from tp.kernels.gated_activation import silu_and_mul
from tp.kernels.int8_weight import Int8Weight
from tp.kernels.linear import FEW_ROWS, UPCAST_ROWS, linear
from tp.kernels.prefill_attention import has_prefill_attention
from tp.kernels.rotary import apply_rotary, cos_and_sin
from tp.native.library import library
from tp.parallel.partition import uniform_runs

DTYPES = [torch.float32, torch.bfloat16]
HAS_GEMM = hasattr(library(), "tp_gemm_bfloat16")


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
    torch.set_num_threads(1)


def random(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed + sum(sizes))).to(dtype)


def assert_rounded_once(y: Tensor, exact: Tensor, scale: Tensor) -> None:
    """`y` is `exact` but for float32 accumulation of terms of size `scale`, and one rounding to its dtype."""
    rounding = torch.finfo(y.dtype).eps / 2 * exact.abs()
    assert ((y.double() - exact).abs() <= rounding + 2e-6 * scale).all()


def no_linear_of_torch() -> AbstractContextManager[object]:
    """Where a GEMM of ours has to serve."""
    if HAS_GEMM:
        return mock.patch.object(torch.nn.functional, "linear", side_effect=AssertionError("torch's own"))
    return nullcontext()


def test_the_library_is_there() -> None:
    assert library() is not None, "python -m tp.native.build"


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, columns, out", [(1, 37, 5), (1, 640, 2), (2, 64, 7), (3, 7, 1), (5, 129, 9), (8, 896, 33), (32, 100, 13)]
)
def test_linear_of_few_rows(rows: int, columns: int, out: int, dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    x, weight, bias = random(rows, columns, dtype=dtype), random(out, columns, dtype=dtype), random(out, dtype=dtype)
    assert rows <= FEW_ROWS
    for given in (None, bias):
        y = linear(x, weight, given)
        exact = x.double() @ weight.double().t() + (0 if given is None else given.double())
        scale = x.double().abs() @ weight.double().abs().t()
        assert y.dtype == dtype
        assert_rounded_once(y, exact, scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_takes_any_strides_and_shapes(dtype: torch.dtype) -> None:
    weight = random(6, 40, dtype=dtype)
    wide = random(4, 90, dtype=dtype)
    for x in (
        wide[:, 7:47],
        wide[:, :80:2],
        random(40, 4, dtype=dtype).t(),
        random(2, 3, 40, dtype=dtype),
        wide[0, :40],
    ):
        y = linear(x, weight)
        torch.testing.assert_close(y, torch.nn.functional.linear(x.contiguous(), weight))
    strided = random(40, 6, dtype=dtype).t()
    torch.testing.assert_close(linear(wide[:, :40], strided), torch.nn.functional.linear(wide[:, :40], strided))
    assert linear(wide[:0, :40], weight).shape == (0, 6)


def test_what_torch_refuses_is_refused() -> None:
    x, weight, strided = random(2, 40), random(6, 40), random(12)[::2]
    with pytest.raises(RuntimeError):
        linear(x[:, :39], weight)
    with pytest.raises(RuntimeError):
        linear(x, weight, random(5))
    torch.testing.assert_close(linear(x, weight, strided), torch.nn.functional.linear(x, weight, strided))


def test_nan_and_infinity_pass_through() -> None:
    x = random(1, 64, dtype=torch.bfloat16)
    weight = random(3, 64, dtype=torch.bfloat16)
    weight[1, 5], weight[2, 6] = float("nan"), float("inf")
    y = linear(x, weight)
    assert y[0, 0].isfinite()
    assert y[0, 1].isnan()
    assert y[0, 2].isinf()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "rows, columns, out",
    [(33, 2, 1), (34, 70, 16), (38, 896, 33), (47, 100, 64), (100, 38, 130), (39, 4130, 65), (2055, 34, 19)],
)
def test_linear_of_many_rows(rows: int, columns: int, out: int, threads: int) -> None:
    torch.set_num_threads(threads)
    wide, bias = random(rows, columns + 3, dtype=torch.bfloat16), random(out, dtype=torch.bfloat16)
    x, weight = wide[:, 3:], random(out, columns, dtype=torch.bfloat16)
    for given in (None, bias):
        with no_linear_of_torch():
            y = linear(x, weight, given)
        exact = x.double() @ weight.double().t() + (0 if given is None else given.double())
        assert_rounded_once(y, exact, x.double().abs() @ weight.double().abs().t())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("weights", ["plain", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns, out", [(24, 5), (100, 48), (896, 97), (333, 3)])
def test_a_row_of_few_is_the_same_whatever_their_number(
    columns: int, out: int, dtype: torch.dtype, weights: str, threads: int
) -> None:
    torch.set_num_threads(threads)
    x, weight, bias = (random(*sizes, dtype=dtype) for sizes in ((FEW_ROWS, columns), (out, columns), (out,)))
    used = Int8Weight(weight, weight.abs().amax(1)) if weights == "int8" else weight
    alone = torch.cat([linear(row, used, bias) for row in x.split(1)])
    for rows in range(2, FEW_ROWS + 1):
        assert torch.equal(linear(x[:rows], used, bias), alone[:rows]), rows


@pytest.mark.skipif(not HAS_GEMM, reason="the CPU has no AVX2, or AMX for bfloat16")
def test_a_row_of_many_is_the_same_whatever_their_number() -> None:
    x, weight = random(200, 4130, dtype=torch.bfloat16), random(70, 4130, dtype=torch.bfloat16)
    with no_linear_of_torch():
        y = linear(x, weight)
        for start, stop in ((0, 33), (5, 61), (100, 200)):
            assert torch.equal(linear(x[start:stop], weight), y[start:stop])
        x[3, 7] = float("nan")
        assert linear(x, weight).isnan().any(1).nonzero().flatten().tolist() == [3]


def test_odd_columns_are_multiplied_too() -> None:
    x, weight = random(40, 33, dtype=torch.bfloat16), random(9, 33, dtype=torch.bfloat16)
    exact = x.double() @ weight.double().t()
    assert_rounded_once(linear(x, weight), exact, x.double().abs() @ weight.double().abs().t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_cast_to_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "faster_in_float32", lambda x: True)
    x, bias = random(FEW_ROWS + 1, 51, dtype=dtype), random(UPCAST_ROWS + 3, dtype=dtype)
    weight = random(UPCAST_ROWS + 3, 51, dtype=dtype)
    exact = x.double() @ weight.double().t() + bias.double()
    assert_rounded_once(linear(x, weight, bias), exact, x.double().abs() @ weight.double().abs().t())


def test_upcast_matmul_is_switched_off_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upcast_matmul, "_lacks_products", lambda dtype: True)
    for disabled in (frozenset(), frozenset([upcast_matmul.NAME])):
        monkeypatch.setattr(choice, "_disabled", disabled)
        assert upcast_matmul.faster_in_float32(random(2, 2)) == (not disabled)


@pytest.mark.parametrize("threads", [1, 16])  # more than KV heads: the context is split between them
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(
    "heads, kv_heads, tp_size, tp_rank, head_dim",
    [(14, 2, 4, 1, 8), (6, 3, 1, 0, 40), (9, 3, 2, 1, 64), (3, 3, 1, 0, 34), (7, 1, 1, 0, 72)],
)
def test_decode_attention(
    heads: int,
    kv_heads: int,
    tp_size: int,
    tp_rank: int,
    head_dim: int,
    window: int | None,
    dtype: torch.dtype,
    threads: int,
) -> None:
    torch.set_num_threads(threads)
    assert has_decode_attention(dtype, torch.device("cpu"))
    runs = uniform_runs(heads, kv_heads, tp_size, tp_rank)
    queries, keys = runs[-1].queries.stop, runs[-1].kv_heads.stop
    slots, starts = torch.tensor([3, 0, 1]), torch.tensor([0, 300, 1100])
    fused = random(3, (queries + 2 * keys) * head_dim, dtype=dtype).unflatten(1, (-1, head_dim))
    q, k, v = fused.split([queries, keys, keys], dim=1)
    angles = random(3, 1, head_dim // 2).repeat(1, 1, 2)
    rotary = angles.cos().to(dtype), angles.sin().to(dtype)
    cache = random(4, keys, 1111, head_dim, dtype=dtype), random(4, keys, 1111, head_dim, seed=1, dtype=dtype)
    reference = cache[0].clone(), cache[1].clone()
    z = decode_attention(q, k, v, rotary, cache, slots, starts, QueryGroups.of_runs(runs, "cpu"), window)
    turned_q, turned_k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
    for row, (slot, start) in enumerate(zip(slots.tolist(), starts.tolist(), strict=True)):
        reference[0][slot, :, start], reference[1][slot, :, start] = turned_k[row], v[row]
        wide = (x[slot, :, : start + 1].double() for x in reference)
        expected = causal_attention(turned_q[row].double().unsqueeze(1), *wide, runs, window).squeeze(1)
        assert_rounded_once(z[row], expected, torch.ones(()).double())
    assert torch.equal(cache[0], reference[0]), (
        "keys are appended with the rounding of apply_rotary, nothing else changes"
    )
    assert torch.equal(cache[1], reference[1])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize("queries, keys", [(1, 1), (49, 49), (6, 133), (130, 200)])
@pytest.mark.parametrize(
    "heads, kv_heads, tp_size, tp_rank, head_dim", [(14, 2, 4, 1, 8), (6, 3, 1, 0, 5), (9, 3, 2, 1, 80)]
)
def test_prefill_attention(
    heads: int,
    kv_heads: int,
    tp_size: int,
    tp_rank: int,
    head_dim: int,
    queries: int,
    keys: int,
    window: int | None,
    dtype: torch.dtype,
    threads: int,
) -> None:
    """Blocks of keys and queries that are full, partly masked and cut short; a cache of more room than it holds."""
    torch.set_num_threads(threads)
    runs = uniform_runs(heads, kv_heads, tp_size, tp_rank)
    q = random(queries, runs[-1].queries.stop, head_dim, dtype=dtype).transpose(0, 1)
    k, v = (random(runs[-1].kv_heads.stop, keys + 3, head_dim, seed=s, dtype=dtype)[:, :keys] for s in (0, 1))
    assert has_prefill_attention(q, k, v)
    z = causal_attention(q, k, v, runs, window)
    expected = causal_attention(q.double(), k.double(), v.double(), runs, window)
    weighed = causal_attention(q.double(), k.double(), v.double().abs(), runs, window)
    of_weights = torch.finfo(dtype).eps / 2 * weighed  # in bfloat16 they may be rounded before they are multiplied
    assert ((z.double() - expected).abs() <= torch.finfo(dtype).eps / 2 * expected.abs() + of_weights + 2e-6).all()


def test_prefill_attention_where_it_cannot_serve() -> None:
    q = random(2, 5, 8)
    assert not has_prefill_attention(q.half(), q.half(), q.half())
    assert not has_prefill_attention(q, q.transpose(1, 2).contiguous().transpose(1, 2), q)
    with torch.enable_grad():
        assert not has_prefill_attention(q, q, q)


def test_nan_and_infinity_pass_through_prefill_attention() -> None:
    runs = uniform_runs(2, 2, 1, 0)
    q, k, v = (random(2, 70, 8, seed=seed) for seed in range(3))
    q[0, 3, 1], v[1, 66, 2] = torch.nan, torch.inf
    z = causal_attention(q, k, v, runs)
    assert z[0, 3].isnan().all() and z[0, :3].isfinite().all() and z[0, 4:].isfinite().all()
    assert (z[1, 66:, 2] == torch.inf).all() and z[1, :48].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_later_key_adds_nothing_however_large_its_value(dtype: torch.dtype) -> None:
    q, k, v = (random(1, 20, 8, seed=seed, dtype=dtype) for seed in range(3))
    v[0, 7] = 3e38
    runs = uniform_runs(1, 1, 1, 0)
    assert torch.equal(causal_attention(q, k, v, runs)[:, :7], causal_attention(*(x[:, :7] for x in (q, k, v)), runs))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_below_every_float_weigh_nothing(dtype: torch.dtype) -> None:
    """Keys whose product with the query is −inf, a whole block of them first, beside others; and one far below."""
    keys = 100
    q, k, v = torch.ones(1, keys, 8, dtype=dtype), *(random(1, keys, 8, seed=seed, dtype=dtype) for seed in (1, 2))
    k[0, :64], k[0, 70] = -3e38, -100
    v[0, 70] = 3e38
    runs = uniform_runs(1, 1, 1, 0)
    exact = causal_attention(q.double(), k.double(), v.double(), runs)[0, 80:]
    bound = torch.finfo(dtype).eps * 3
    assert ((causal_attention(q, k, v, runs)[0, 80:].double() - exact).abs() <= bound).all()
    rotary = torch.ones(1, 1, 8, dtype=dtype), torch.zeros(1, 1, 8, dtype=dtype)
    cache = k.clone().unsqueeze(0), v.clone().unsqueeze(0)
    last = q[:, -1:], k[:, -1:], v[:, -1:]
    start, groups = torch.tensor([keys - 1]), QueryGroups.of_runs(runs, "cpu")
    z = decode_attention(*last, rotary, cache, torch.tensor([0]), start, groups)
    assert ((z[0, 0].double() - exact[-1]).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_of_gates_far_below_zero_is_zero(dtype: torch.dtype) -> None:
    gate = torch.tensor([[-3e38, -1e36, -300.0, -89.0, 89.0, 3e38, torch.inf, torch.nan]], dtype=dtype)
    y = silu_and_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))
    assert torch.equal(y[0, :7], gate[0, :7].clamp(min=0)) and y[0, 7].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_indices_and_positions_of_any_strides_and_integers(dtype: torch.dtype) -> None:
    table, wide, frequencies = random(9, 5, dtype=dtype), torch.tensor([8, -1, 3, -1, 0, -1]), random(4).abs()
    expected = cos_and_sin(torch.tensor([8, 3, 0]), frequencies, 1.0, dtype)
    int8 = Int8Weight(table, table.abs().amax(1))
    for indices in (wide[::2], wide[::2].int()):
        assert torch.equal(embedding_lookup(table, indices), table[[8, 3, 0]])
        assert torch.equal(embedding_lookup(int8, indices), int8.rows(torch.tensor([8, 3, 0])))
        torch.testing.assert_close(cos_and_sin(indices, frequencies, 1.0, dtype), expected)
