"""What one step asks of one rank: products, bytes, collectives. Counted, not timed.

With N tokens, s of them in the rank's share of the stream, D the hidden size, and Q, K, I the rank's query, KV and
intermediate widths, what is no product reads and writes, in elements a layer,

    norms        4·s·D each    the partial sum and the state in, the state and the norm out
    rotary       N·(2Q + 2K)   queries and keys in and out
    cache        N·4K          keys and values in and out
    activation   N·3I          gate and up in, their product out (2I without a gate)

and a greedy choice `SAMPLER_BYTES` a logit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tp.config import ModelConfig
from tp.layers.layout import shards_without_gradients
from tp.layers.step import SequenceSlice
from tp.models.norm_placement import PLACEMENTS
from tp.parallel.partition import ceil_div
from tp.planning.parameters import Matrix, RankModel
from tp.planning.step_collectives import Collective, step_collectives, training_collectives

SAMPLER_BYTES = 40
"""Of a logit in torch operations: read, widened to float32, searched, summed up. Where C++ does it, the rate tells."""
OPTIMIZER_BYTES = 28
"""Of a parameter in a step of AdamW: itself, its gradient and two moments read, all but the gradient written."""


@dataclass(frozen=True)
class Product:
    """x Wᵀ with `rows` rows of x, `count` times."""

    rows: int
    matrix: Matrix
    count: int


@dataclass(frozen=True)
class StepWork:
    """One step of one rank.

    Attributes:
        products: of the layers, then of the head.
        attention_flops: of scores and weighted sums; none where each sequence has one token, whose attention is
            limited by reading the cache.
        cache_bytes: keys and values that are read.
        stream_bytes: read and written by what is no product.
        sampler_bytes: of logits that tokens are chosen from.
        optimizer_bytes: read and written by the optimiser.
        num_layers: passes through a layer, forward, backward and again, each of which has its fixed cost.
        captured: a decode step, which is replayed.
        collectives: none where the rank is alone.
    """

    products: tuple[Product, ...]
    attention_flops: int
    cache_bytes: int
    stream_bytes: int
    num_layers: int
    captured: bool
    collectives: tuple[Collective, ...]
    sampler_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def flops(self) -> int:
        """Of the products."""
        return sum(2 * product.rows * product.matrix.elements * product.count for product in self.products)


@dataclass(frozen=True)
class AlikeSteps:
    """Steps that differ in nothing but what their attention sees: those of a long prefill, worked out once.

    Attributes:
        work: of each of them, without attention.
        attention: of each, the FLOPs, and the bytes of the cache.
    """

    work: StepWork
    attention: tuple[tuple[int, int], ...]

    def each(self) -> list[StepWork]:
        """Every step by itself."""
        return [replace(self.work, attention_flops=flops, cache_bytes=nbytes) for flops, nbytes in self.attention]


def decode_work(
    model: RankModel, batch: int, context: int, *, captured: bool = True, sharded: bool = False
) -> StepWork:
    """One more token for each of `batch` sequences, which then have `context` tokens.

    Args:
        sharded: sequence parallelism.
    """
    pieces = [SequenceSlice(1, context - 1)] * batch
    work = _step(model, batch, batch, captured=captured, sharded=sharded, num_sampled=batch)
    return replace(work, cache_bytes=_cache_bytes(model, _windows(model.config), pieces))


def prefill_work(
    model: RankModel, batch: int, prompt: int, chunk: int, shards: Callable[[int], bool] = shards_without_gradients
) -> list[StepWork]:
    """The steps of `prefill_steps`, each by itself, in no particular order."""
    return [step for alike in prefill_steps(model, batch, prompt, chunk, shards) for step in alike.each()]


def prefill_steps(
    model: RankModel, batch: int, prompt: int, chunk: int, shards: Callable[[int], bool] = shards_without_gradients
) -> list[AlikeSteps]:
    """The steps that process `batch` prompts of `prompt` tokens, `chunk` tokens at a time.

    Args:
        shards: whether a step of so many tokens is sharded.
    """
    windows = _windows(model.config)
    attention: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for pieces in prefill_pieces(batch, prompt, chunk):
        tokens = sum(piece.length for piece in pieces)
        complete = sum(piece.start + piece.length == prompt for piece in pieces)
        flops = 0 if tokens == len(pieces) else _attention_flops(model, windows, pieces)
        seen = flops, _cache_bytes(model, windows, pieces)
        attention.setdefault((tokens, len(pieces), complete), []).append(seen)
    steps = []
    for (tokens, num_pieces, complete), seen_by_each in attention.items():
        work = _step(model, tokens, num_pieces, captured=False, sharded=shards(tokens), num_sampled=complete)
        steps.append(AlikeSteps(work, tuple(seen_by_each)))
    return steps


def prefill_pieces(batch: int, prompt: int, chunk: int) -> list[list[SequenceSlice]]:
    """The pieces of prompts that each step takes, as `tp.generation.scheduler` deals them out."""
    steps: list[list[SequenceSlice]] = []
    budget = 0
    for _ in range(batch):
        start = 0
        while start < prompt:
            if not budget:
                steps.append([])
                budget = chunk
            length = min(budget, prompt - start)
            steps[-1].append(SequenceSlice(length, start))
            start, budget = start + length, budget - length
    return steps


def training_work(model: RankModel, batch: int, context: int, *, sharded: bool, recomputed: bool) -> StepWork:
    """Forward, backward and update over `batch` rows of `context` tokens at once.

    The backward of a product is two products of its size, that of attention two and a half times its forward.

    Args:
        sharded: sequence parallelism.
        recomputed: activation checkpointing: layers run forward once more in the backward.
    """
    pieces = [SequenceSlice(context)] * batch
    tokens, layers = batch * context, model.parameters.num_layers
    own = ceil_div(tokens, model.tp_size) if sharded else tokens
    passes = 4 if recomputed else 3
    products = [Product(tokens, matrix, passes * layers) for matrix in model.parameters.layer_matrices]
    return StepWork(
        products=(*products, Product(tokens, model.parameters.head, 3)),
        attention_flops=int((4.5 if recomputed else 3.5) * _attention_flops(model, _windows(model.config), pieces)),
        cache_bytes=0,
        stream_bytes=passes * _stream_bytes(model, tokens, own),
        num_layers=passes * layers,
        captured=False,
        collectives=training_collectives(model, tokens, sharded, recomputed) if model.tp_size > 1 else (),
        optimizer_bytes=OPTIMIZER_BYTES * model.parameters.elements,
    )


def _step(
    model: RankModel, tokens: int, num_pieces: int, *, captured: bool, sharded: bool, num_sampled: int
) -> StepWork:
    """A forward that chooses `num_sampled` tokens, without its attention.

    If it chooses any, the head sees the last token of every piece, and the last layer's output projection and MLP see
    no others.
    """
    layers = model.parameters.num_layers
    num_logits = num_pieces if num_sampled else 0
    own = ceil_div(tokens, model.tp_size) if sharded else tokens
    qkv, *others = model.parameters.layer_matrices
    products = [Product(tokens, qkv, layers)]
    products += [Product(tokens, matrix, layers if num_logits == tokens else layers - 1) for matrix in others]
    if num_logits not in (0, tokens):
        products += [Product(num_logits, matrix, 1) for matrix in others]
    if num_logits:
        products.append(Product(num_logits, model.parameters.head, 1))
    return StepWork(
        products=tuple(products),
        attention_flops=0,
        cache_bytes=0,
        stream_bytes=_stream_bytes(model, tokens, own),
        sampler_bytes=SAMPLER_BYTES * num_sampled * model.parameters.head.rows,
        num_layers=layers,
        captured=captured,
        collectives=step_collectives(model, tokens, sharded, num_logits, num_sampled) if model.tp_size > 1 else (),
    )


Windows = Sequence[tuple[int | None, int]]
"""Each window that layers have, and how many have it."""


def _attention_flops(model: RankModel, windows: Windows, pieces: Sequence[SequenceSlice]) -> int:
    """A query times each key that it sees, and its weights times their values."""
    seen = sum(count * _seen_by_all(pieces, window) for window, count in windows)
    return 4 * model.query_width * seen


def _cache_bytes(model: RankModel, windows: Windows, pieces: Sequence[SequenceSlice]) -> int:
    """Keys and values that some token of a step sees, once for each layer."""
    seen = 0
    for window, count in windows:
        for piece in pieces:
            total = piece.start + piece.length
            seen += count * (total if window is None else min(total, piece.length + window - 1))
    return 2 * seen * model.kv_width * model.precision.itemsize


def _windows(config: ModelConfig) -> Windows:
    return [(window, config.sliding_windows.count(window)) for window in dict.fromkeys(config.sliding_windows)]


def _seen_by_all(pieces: Sequence[SequenceSlice], window: int | None) -> int:
    """Σ over tokens of the positions that each sees."""
    return sum(_seen(piece.start, piece.length, window) for piece in pieces)


@functools.cache
def _seen(start: int, length: int, window: int | None) -> int:
    """Σ min(window, start + i) for i in 1..length."""
    unbounded = length if window is None else max(0, min(length, window - start))
    return unbounded * start + unbounded * (unbounded + 1) // 2 + (length - unbounded) * (window or 0)


def _stream_bytes(model: RankModel, tokens: int, own_tokens: int) -> int:
    """See the module's head."""
    placement = PLACEMENTS[model.config.norm_placement]
    norms = (len(placement.attention) + len(placement.mlp)) * 4 * own_tokens * model.config.hidden_size
    rotary_and_cache = tokens * (2 * model.query_width + 6 * model.kv_width)
    activation = tokens * (3 if model.config.gated_mlp else 2) * model.parameters.intermediate
    elements = model.parameters.num_layers * (norms + rotary_and_cache + activation)
    return elements * model.precision.itemsize
