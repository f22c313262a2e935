"""Times of the Triton kernels on a GPU, as a share of its copy bandwidth and beside what torch has for the same.

    python benchmarks/kernels.py [--only fused_add_rms_norm,rotary] [--json FILE]

Needs a CUDA device. Bytes are those that an operation must read and write, each once; times are medians of single
launches, each after a write that empties the caches and keeps the GPU busy while the launch is prepared.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from launch.arguments import output_file
from launch.measurement.copy_bandwidth import copy_bandwidth
from launch.measurement.spread import Spread
from tp.kernels.cache_attention import QueryGroups, cache_attention
from tp.kernels.cross_entropy import plain_shard_gradient, plain_shard_statistics, shard_gradient, shard_statistics
from tp.kernels.fused_add_rms_norm import fused_add_rms_norm, plain_fused_add_rms_norm
from tp.kernels.gated_activation import plain_activation_and_mul, plain_activation_and_mul_backward, silu_and_mul
from tp.kernels.int8_weight import Int8Weight
from tp.kernels.linear import linear
from tp.kernels.reduce_add_rms_norm import add_rms_norm, plain_add_rms_norm
from tp.kernels.rms_norm import plain_rms_norm, plain_rms_norm_backward, rms_norm
from tp.kernels.rotary import apply_rotary, rotate_queries_and_keys

DTYPE = torch.bfloat16
FLUSH_BYTES = 512 << 20
"""Written before each measurement: several times the last-level cache of any GPU."""
EPS = 1e-6


@dataclass(frozen=True)
class Sizes:
    """What the operations are given.

    Attributes:
        elements: of a tensor of rows; as many rows as hold them.
        hidden, intermediate: widths of rows.
        heads: (query heads, KV heads, head_dim) of rotary embeddings.
        caches: (batch, query heads, KV heads, head_dim, cached tokens) of attention.
        matrices: (rows of x, out, in) of linears with int8 weights; those of a 7B in decode by default, one in prefill.
        logits: (rows, vocabulary) of the loss.
    """

    elements: int = 32 << 20
    hidden: tuple[int, ...] = (896, 1536, 2048, 3584, 4096, 5120, 8192)
    intermediate: tuple[int, ...] = (4864, 18944)
    heads: tuple[tuple[int, int, int], ...] = ((14, 2, 64), (28, 4, 128))
    caches: tuple[tuple[int, int, int, int, int], ...] = (
        (1, 14, 2, 64, 4096), (1, 28, 4, 128, 4096), (8, 28, 4, 128, 4096), (8, 28, 4, 128, 32768)
    )  # fmt: skip
    matrices: tuple[tuple[int, int, int], ...] = (
        *((rows, *shape) for rows in (1, 8)
          for shape in ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (152064, 3584))),
        (512, 37888, 3584),
    )  # fmt: skip
    logits: tuple[int, int] = (2048, 151936)


@dataclass(frozen=True)
class Case:
    """One operation at one size.

    Attributes:
        operation, size: for people.
        nbytes: that must be read and written.
        ours: one launch.
        other: the same by other means, already compiled or torch's own.
    """

    operation: str
    size: str
    nbytes: int
    ours: Callable[[], object]
    other: Callable[[], object]


def milliseconds(run: Callable[[], object], device: torch.device, runs: int) -> Spread:
    """Of single launches between events on the stream, after three that do not count."""
    flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
    for _ in range(3):
        run()
    for start, end in events:
        flushed.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return Spread.of(start.elapsed_time(end) for start, end in events)


def compiled_for_each_shape(function: Callable[..., Any]) -> Callable[..., Any]:
    """By torch.compile at the first call, for the shapes of that call alone."""
    compiled = functools.cache(lambda: torch.compile(function, dynamic=False))
    return lambda *arguments: compiled()(*arguments)


def all_cases(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    """A case's tensors live until the next is asked for."""
    for make in (norm_cases, activation_cases, rotary_cases, attention_cases, int8_cases, loss_cases):
        yield from make(device, sizes)


def norm_cases(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    for width in sizes.hidden:
        x, residual, dy = (torch.randn(sizes.elements // width, width, device=device, dtype=DTYPE) for _ in range(3))
        weight = torch.ones(width, device=device, dtype=DTYPE)
        size, element_bytes = f"{len(x)} x {width}", x.nbytes
        compiled = compiled_for_each_shape(plain_fused_add_rms_norm)
        yield Case(
            "fused_add_rms_norm", size, 4 * element_bytes,
            lambda: fused_add_rms_norm(x, residual, weight, EPS),  # noqa: B023 (a case is timed before the next is made)
            lambda: compiled(x, residual, weight, EPS),  # noqa: B023
        )  # fmt: skip
        compiled_add_norm = compiled_for_each_shape(plain_add_rms_norm)
        yield Case(
            "add_rms_norm", size, 4 * element_bytes,
            lambda: add_rms_norm(x, None, residual, weight, EPS),  # noqa: B023
            lambda: compiled_add_norm(x, None, residual, weight, EPS),  # noqa: B023
        )  # fmt: skip
        compiled_norm = compiled_for_each_shape(plain_rms_norm)
        yield Case(
            "rms_norm", size, 2 * element_bytes,
            lambda: rms_norm(x, weight, EPS), lambda: compiled_norm(x, weight, EPS),  # noqa: B023
        )  # fmt: skip
        yield _norm_backward(dy, x, weight, size)


def _norm_backward(dy: Tensor, x: Tensor, weight: Tensor, size: str) -> Case:
    from tp.kernels.triton.rms_norm import rms_norm_backward

    reciprocal = plain_rms_norm(x, weight, EPS)[1]
    compiled = compiled_for_each_shape(plain_rms_norm_backward)
    return Case(
        "rms_norm backward", size, 3 * x.nbytes,
        lambda: rms_norm_backward(dy, x, weight, reciprocal), lambda: compiled(dy, x, weight, reciprocal),
    )  # fmt: skip


def activation_cases(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    from tp.kernels.triton.silu_and_mul import silu_and_mul_backward

    for width in sizes.intermediate:
        rows = sizes.elements // width
        gate_up = torch.randn(rows, 2 * width, device=device, dtype=DTYPE)
        dy = torch.randn(rows, width, device=device, dtype=DTYPE)
        compiled = compiled_for_each_shape(plain_activation_and_mul)
        size = f"{rows} x {width}"
        yield Case(
            "silu_and_mul", size, gate_up.nbytes + dy.nbytes,
            lambda: silu_and_mul(gate_up), lambda: compiled(gate_up, "silu"),  # noqa: B023
        )  # fmt: skip
        yield Case(
            "silu_and_mul backward", size, 2 * gate_up.nbytes + dy.nbytes,
            lambda: silu_and_mul_backward(dy, gate_up),  # noqa: B023
            lambda: plain_activation_and_mul_backward(dy, gate_up, "silu"),  # noqa: B023
        )  # fmt: skip


def rotary_cases(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    for heads, kv_heads, head_dim in sizes.heads:
        tokens = sizes.elements // ((heads + kv_heads) * head_dim)
        fused = torch.randn(tokens, heads + 2 * kv_heads, head_dim, device=device, dtype=DTYPE)
        q, k, _ = fused.split([heads, kv_heads, kv_heads], dim=1)
        cos, sin = (torch.randn(tokens, 1, head_dim, device=device, dtype=DTYPE) for _ in range(2))
        compiled = compiled_for_each_shape(
            lambda q, k, cos, sin: (apply_rotary(q, cos, sin), apply_rotary(k, cos, sin))
        )
        yield Case(
            "rotary", f"{tokens} x ({heads} + {kv_heads}) x {head_dim}",
            2 * (q.numel() + k.numel() + cos.numel()) * DTYPE.itemsize,
            lambda: rotate_queries_and_keys(q, k, cos, sin), lambda: compiled(q, k, cos, sin),  # noqa: B023
        )  # fmt: skip


def _plain_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)


def attention_cases(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    """Beside torch's attention over the same keys, all sequences of one length."""
    for batch, heads, kv_heads, head_dim, length in sizes.caches:
        q = torch.randn(batch, heads, head_dim, device=device, dtype=DTYPE)
        key, value = (torch.randn(batch, kv_heads, length, head_dim, device=device, dtype=DTYPE) for _ in range(2))
        slots = torch.arange(batch, device=device)
        lengths = torch.full_like(slots, length)
        group_size = heads // kv_heads
        bounds = torch.arange(kv_heads + 1, device=device, dtype=torch.int32) * group_size
        groups = QueryGroups(bounds, (group_size,) * kv_heads)
        grouped = q.view(batch, kv_heads, group_size, head_dim)
        yield Case(
            "cache_attention", f"{batch} x ({heads} / {kv_heads}) x {head_dim}, {length} tokens",
            key.nbytes + value.nbytes,
            lambda: cache_attention(q, key, value, slots, lengths, groups),  # noqa: B023
            lambda: functional.scaled_dot_product_attention(grouped, key, value),  # noqa: B023
        )  # fmt: skip


def int8_cases(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    """Beside torch's product with the weights that the integers were made of."""
    for rows, out_features, in_features in sizes.matrices:
        x = torch.randn(rows, in_features, device=device, dtype=DTYPE)
        weight = torch.randn(out_features, in_features, device=device, dtype=DTYPE)
        int8 = Int8Weight(weight, weight.abs().amax(1))
        yield Case(
            "int8_linear", f"{rows} x {in_features} -> {out_features}",
            x.nbytes + int8.values.nbytes + int8.scales.nbytes + rows * out_features * DTYPE.itemsize,
            lambda: linear(x, int8), lambda: functional.linear(x, weight),  # noqa: B023
        )  # fmt: skip


def loss_cases(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    rows, vocab_size = sizes.logits
    logits = torch.randn(rows, vocab_size, device=device, dtype=DTYPE)
    targets = torch.randint(vocab_size, (rows,), device=device)
    valid = torch.ones(rows, dtype=torch.bool, device=device)
    statistics = shard_statistics(logits, targets, vocab_size)
    arguments = (logits, targets, vocab_size, statistics[0], statistics[1].log(), valid, 0.0, vocab_size)
    compiled = compiled_for_each_shape(plain_shard_statistics)
    compiled_gradient = compiled_for_each_shape(plain_shard_gradient)
    size = f"{rows} x {vocab_size}"
    yield Case(
        "cross_entropy", size, logits.nbytes,
        lambda: shard_statistics(logits, targets, vocab_size), lambda: compiled(logits, targets, vocab_size),
    )  # fmt: skip
    yield Case(
        "cross_entropy backward", size, 2 * logits.nbytes,
        lambda: shard_gradient(*arguments), lambda: compiled_gradient(*arguments),
    )  # fmt: skip


def measure(case: Case, device: torch.device, runs: int, copied_per_second: float) -> dict[str, Any]:
    ours, other = milliseconds(case.ours, device, runs), milliseconds(case.other, device, runs)
    bytes_per_second = case.nbytes / (ours.median / 1e3)
    return {
        "operation": case.operation, "size": case.size, "bytes": case.nbytes,
        "milliseconds": asdict(ours), "gigabytes_per_second": bytes_per_second / 1e9,
        "share_of_copy_bandwidth": bytes_per_second / copied_per_second,
        "milliseconds_of_torch": asdict(other), "times_as_fast_as_torch": other.median / ours.median,
    }  # fmt: skip


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="operations whose names begin so, separated by commas")
    parser.add_argument("--runs", type=int, default=50, help="launches that count, of each (default 50)")
    parser.add_argument("--json", type=output_file, help="where to write the results")
    return parser.parse_args()


def main() -> int:
    arguments = parsed_arguments()
    if not torch.cuda.is_available():
        print("benchmarks/kernels.py needs a GPU: this machine has none that torch can use", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    copied = copy_bandwidth(device)
    print(f"{torch.cuda.get_device_name(device)}: copies {copied.median / 1e9:.0f} GB/s")
    results = []
    for case in all_cases(device, Sizes()):
        if case.operation.startswith(tuple(arguments.only.split(","))):
            results.append(measure(case, device, arguments.runs, copied.median))
            print("{operation:24} {size:40} {gigabytes_per_second:7.0f} GB/s {share_of_copy_bandwidth:7.1%} of "
                  "copying, {times_as_fast_as_torch:.2f} times as fast as torch".format(**results[-1]))  # fmt: skip
    if arguments.json:
        facts = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
        content = facts | {"copy_bytes_per_second": asdict(copied), "kernels": results}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
