"""Every Triton kernel against float64 or the plain form, in every dtype; the bounds are those of the tests.

But for products with int8 weights: here are more of them, and larger, and a GPU adds one product after the other.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from bounds import ulps
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_parts.machine import Machine
from benchmarks.gpu_parts.record import Record, require
from tp.kernels.cache_attention import QueryGroups, cache_attention, plain_cache_attention
from tp.kernels.cross_entropy import shard_gradient, shard_statistics
from tp.kernels.fused_add_rms_norm import fused_add_rms_norm, plain_fused_add_rms_norm
from tp.kernels.gated_activation import plain_activation_and_mul, plain_activation_and_mul_backward, silu_and_mul
from tp.kernels.int8_weight import Int8Weight
from tp.kernels.linear import linear
from tp.kernels.reduce_add_rms_norm import add_rms_norm, plain_add_rms_norm
from tp.kernels.rms_norm import plain_rms_norm_backward
from tp.kernels.rotary import apply_rotary, rotate_queries_and_keys
from tp.parallel.communicator import sum_in_rank_order
from tp.parallel.partition import chunk_ranges, uniform_runs
from tp.parallel.symmetric_memory import Addends

EPS = 1e-5
Found = dict[str, Any]


def run(record: Record, machine: Machine) -> None:
    """Each kernel, dtype and width is a result of its own."""
    torch.manual_seed(0)
    for check in (
        norm, norm_backward, fused_add_norm, add_norm, sum_add_norm, silu, silu_backward, rotary, attention, loss,
        int8_product,
    ):  # fmt: skip
        for dtype in machine.checked:
            for width in machine.widths if check in (norm, fused_add_norm, add_norm) else machine.widths[:1]:
                with record.attempt(f"{check.__name__} {width} {dtype}") as found, torch.no_grad():
                    check(machine, dtype, width, found)
    if machine.compiles:
        with record.attempt("rows past 2^31 elements") as found, torch.no_grad():
            far_rows(machine.device)


def normal(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """3 · N(0, 1)."""
    return (3 * torch.randn(*shape)).to(device, dtype)


def norm_weight(device: torch.device, dtype: torch.dtype, width: int) -> Tensor:
    """Around 1."""
    return (1 + 0.3 * torch.randn(width)).to(device, dtype)


def require_equal(value: Tensor, expected: Tensor, what: str) -> None:
    """Bit for bit."""
    require(torch.equal(value, expected), f"{what} differs in {int((value != expected).sum())} of {value.numel()}")


def require_ulps(value: Tensor, expected: Tensor, bound: int, what: str, found: Found) -> None:
    """Within units in the last place, which are recorded."""
    found[f"{what}_ulps"] = ulps(value, expected)
    require(found[f"{what}_ulps"] <= bound, f"{what} is {found[f'{what}_ulps']} ulps away, and may be {bound}")


def require_close(value: Tensor, expected: Tensor, bound: float, what: str, found: Found) -> None:
    """max |Δ| within a share of max |expected|, which is recorded."""
    difference = float((value.double() - expected.double()).abs().max() / expected.double().abs().max())
    found[f"{what}_error"] = difference
    require(difference <= bound, f"{what} is {difference:.3g} of the largest away, and may be {bound:.3g}")


def norm(machine: Machine, dtype: torch.dtype, width: int, found: Found) -> None:
    from tp.kernels.triton.rms_norm import rms_norm_forward

    device, rows = machine.device, machine.rows
    x, weight = normal(device, dtype, rows, width), norm_weight(device, torch.float32, width)
    y, reciprocal = rms_norm_forward(x, weight, EPS)
    require_ulps(reciprocal, (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt(), 4, "reciprocal", found)
    require_equal(y, (x.float() * reciprocal).to(dtype) * weight.to(dtype), "the norm from it")


def norm_backward(machine: Machine, dtype: torch.dtype, width: int, found: Found) -> None:
    from tp.kernels.triton.rms_norm import rms_norm_backward, rms_norm_forward

    device, rows = machine.device, machine.rows
    x, dy = normal(device, dtype, rows, width), normal(device, dtype, rows, width)
    weight = norm_weight(device, dtype, width)
    reciprocal = rms_norm_forward(x, weight, EPS)[1]
    dx, d_weight = rms_norm_backward(dy, x, weight, reciprocal)
    exact = plain_rms_norm_backward(dy, x, weight, reciprocal)
    bound = 1e-6 if dtype == torch.float32 else 2**-7
    require_close(dx, exact[0], bound, "dx", found)
    require_close(d_weight, exact[1], bound, "d_weight", found)
    require_equal(rms_norm_backward(dy, x, weight, reciprocal)[1], d_weight, "the weight gradient, repeated,")


def _norm_bound(dtype: torch.dtype) -> int:
    return 8 if dtype == torch.float32 else 2


def fused_add_norm(machine: Machine, dtype: torch.dtype, width: int, found: Found) -> None:
    device, rows = machine.device, machine.rows
    x, residual = normal(device, dtype, rows, width), normal(device, dtype, rows, width)
    weight = norm_weight(device, dtype, width)
    expected_x, expected_residual = x.clone(), residual.clone()
    plain_fused_add_rms_norm(expected_x, expected_residual, weight, EPS)
    fused_add_rms_norm(x, residual, weight, EPS)
    require_equal(residual, expected_residual, "the residual")
    require_ulps(x, expected_x, _norm_bound(dtype), "norm", found)


def add_norm(machine: Machine, dtype: torch.dtype, width: int, found: Found) -> None:
    device, rows = machine.device, machine.rows
    update, residual = normal(device, dtype, rows, width), normal(device, dtype, rows, width)
    weight, bias = norm_weight(device, dtype, width), norm_weight(device, dtype, width)
    for given in ((None, residual), (bias, residual), (bias, None)):
        state, normed = add_rms_norm(update, *given, weight, EPS)
        expected = plain_add_rms_norm(update, *given, weight, EPS)
        require_equal(state, expected[0], "the state")
        require_ulps(normed, expected[1], _norm_bound(dtype), "norm", found)


def sum_add_norm(machine: Machine, dtype: torch.dtype, width: int, found: Found) -> None:
    """The arithmetic of both shots, with the addends of three ranks in this process."""
    from tp.kernels.triton.reduce_add_rms_norm import reduce_rows
    from tp.kernels.triton.symmetric_memory import one_shot, two_shot

    device, rows = machine.device, machine.rows
    tensors, residual = [normal(device, dtype, rows, width) for _ in range(3)], normal(device, dtype, rows, width)
    weight, bias = norm_weight(device, dtype, width), norm_weight(device, dtype, width)
    expected = plain_add_rms_norm(sum_in_rank_order(tensors), bias, residual, weight, EPS)
    addresses = torch.tensor([tensor.data_ptr() for tensor in tensors], device=device)

    def other_ranks() -> None:
        for rank in (1, 2):
            reduce_rows(addresses, tensors[rank], chunk_ranges(rows, 3)[rank], bias)

    addends = Addends(tensors, 0, addresses, other_ranks)
    results = {"one_shot": one_shot(addends, range(rows), bias, residual, weight, EPS)}
    results["two_shot"] = two_shot(addends, bias, residual, weight, EPS)
    for name, (state, normed) in results.items():
        require_equal(state, expected[0], f"the state of {name}")
        require_ulps(normed, expected[1], _norm_bound(dtype), name, found)


def silu(machine: Machine, dtype: torch.dtype, width: int, found: Found) -> None:
    device, rows = machine.device, machine.rows
    gate_up = normal(device, dtype, rows, 2 * width)
    expected = plain_activation_and_mul(gate_up, "silu")
    require_ulps(silu_and_mul(gate_up), expected, 16 if dtype == torch.float32 else 2, "silu", found)


def silu_backward(machine: Machine, dtype: torch.dtype, width: int, found: Found) -> None:
    from tp.kernels.triton.silu_and_mul import silu_and_mul_backward

    device, rows = machine.device, machine.rows
    gate_up, dy = normal(device, dtype, rows, 2 * width), normal(device, dtype, rows, width)
    expected = plain_activation_and_mul_backward(dy, gate_up, "silu")
    require_close(silu_and_mul_backward(dy, gate_up), expected, 4 * torch.finfo(dtype).eps, "gradient", found)


def rotary(machine: Machine, dtype: torch.dtype, width: int, found: Found) -> None:
    device, rows = machine.device, machine.rows
    fused = normal(device, dtype, rows, 18, 64)
    q, k, _ = fused.split([14, 2, 2], dim=1)
    angles = 10 * torch.randn(rows, 1, 64)
    cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    for name, x, rotated in zip("qk", (q, k), rotate_queries_and_keys(q, k, cos, sin), strict=True):
        require_equal(rotated, apply_rotary(x, cos, sin), f"rotated {name}")


def attention(machine: Machine, dtype: torch.dtype, width: int, found: Found) -> None:
    """Sequences of several lengths, with and without a window, against float64."""
    device = machine.device
    bound = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    for *split, head_dim in machine.heads:
        groups = QueryGroups.of_runs(uniform_runs(*split), device)
        q = torch.randn(4, sum(groups.sizes), head_dim).to(device, dtype)
        caches = [torch.randn(5, len(groups.sizes), 150, head_dim).to(device, dtype) for _ in range(2)]
        slots, lengths = torch.tensor([2, 0, 4, 1], device=device), torch.tensor([150, 0, 77, 1], device=device)
        wide = [cache.double() for cache in caches]
        for window in (None, 70):
            result = cache_attention(q, *caches, slots, lengths, groups, window)
            exact = plain_cache_attention(q.double(), *wide, slots, lengths, groups, window)
            require_close(result, exact, 2 * bound, f"{split[0]}_{window}", found)


def loss(machine: Machine, dtype: torch.dtype, width: int, found: Found) -> None:
    """Two shards of a vocabulary against torch's float64."""
    device = machine.device
    vocab = 2 * width + 5
    whole = normal(device, dtype, 6, vocab)
    labels = torch.tensor([0, width, -100, vocab - 1, width - 1, width + 1], device=device)
    shards = [(whole[:, :width], labels, width), (whole[:, width:], labels - width, vocab - width)]
    maxima, sums, targets, _ = torch.stack([shard_statistics(*shard) for shard in shards]).unbind(1)
    top = maxima.amax(0)
    log_sum = (sums * (maxima - top).exp()).sum(0).log()
    valid = labels != -100
    total = (log_sum - (targets.sum(0) - top)).where(valid, 0).sum()
    gradient = torch.cat([shard_gradient(*shard, top, log_sum, valid, 0.0, vocab) for shard in shards], dim=1)
    with torch.enable_grad():
        reference = whole.double().requires_grad_()
        expected = functional.cross_entropy(reference, labels, reduction="sum")
        expected.backward()
    assert reference.grad is not None
    require_close(total, expected.detach(), 1e-6, "loss", found)
    require_close(gradient, reference.grad, 2 * torch.finfo(dtype).eps, "gradient", found)


def int8_product(machine: Machine, dtype: torch.dtype, width: int, found: Found) -> None:
    """Every shape of tiles, against float64; the second weight has columns enough for programs to share them."""
    device = machine.device
    for out_features, in_features in ((width, width), (70, 8200)):
        bound = max(torch.finfo(dtype).eps, float32_sum_error(in_features))
        weight = normal(device, dtype, out_features, in_features)
        int8, bias = Int8Weight(weight, weight.abs().amax(1)), normal(device, dtype, out_features)
        exact_weight = int8.values.double() * int8.scales.double().unsqueeze(1)
        for rows in (1, 8, 17, 70):
            x = normal(device, dtype, rows, 2 * in_features)[:, :in_features]
            exact = x.double() @ exact_weight.t() + bias.double()
            require_close(linear(x, int8, bias), exact, bound, f"{rows}_{out_features}_{in_features}", found)


def float32_sum_error(products: int) -> float:
    """What sums of so many products of random signs may lose in float32, one product after the other, of the largest.

    An addition loses up to eps / 2 of a sum that grows as √k: in all 0.15 · eps · K products, root mean square. The
    largest sums come to 4 √K of them. So 0.04 · eps · √K, ten times that in the worst of 10^5 sums, and twice that is
    allowed.
    """
    return torch.finfo(torch.float32).eps * math.sqrt(products)


def far_rows(device: torch.device) -> None:
    """Rows 2^30 elements apart, of which the third is past 2^31."""
    from tp.kernels.triton.int8_linear import int8_linear

    near, residual = (normal(device, torch.bfloat16, 3, 896) for _ in range(2))
    storage = torch.empty(2 * (2**30 + 16) + 2 * 1024, dtype=torch.bfloat16, device=device)
    far = storage.as_strided((3, 896), (2**30 + 16, 1)).copy_(near)
    far_residual = storage.as_strided((3, 896), (2**30 + 16, 1), 1024).copy_(residual)
    weight = norm_weight(device, torch.bfloat16, 896)
    for value, expected in zip(
        add_rms_norm(far, None, far_residual, weight, EPS), add_rms_norm(near, None, residual, weight, EPS), strict=True
    ):
        require_equal(value, expected, "a far row")
    values = torch.randint(-127, 128, (3, 896), dtype=torch.int8, device=device)
    far_values = storage.view(torch.int8).as_strided((3, 896), (2**30 + 16, 1), 8192).copy_(values)
    for rows in (1, 3):
        product = int8_linear(far[:rows], far_values, weight[:3].float(), None)
        require_equal(product, int8_linear(near[:rows], values, weight[:3].float(), None), "the product of far rows")
