"""Cross-entropy over a vocabulary that is split over the group (Shoeybi et al. 2019, section 3).

With z the logits of a token, V of them, y its label and ε the label smoothing (torch's formula):

    loss = (1 − ε) · (lse(z) − z_y) + ε · (lse(z) − mean(z)),   lse(z) = log Σ_v exp z_v
    dz_v = softmax(z)_v − (1 − ε) · [v = y] − ε / V

averaged over the labels that are not ignored, on all data-parallel ranks. A rank knows its columns of z; every
rank gathers the others' (max, Σ exp(z − max), z_y, Σ z), one collective of four numbers a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tp.errors import LayoutError, RequestError
from tp.kernels.cross_entropy import shard_gradient, shard_statistics
from tp.kernels.statistics import statistics_dtype
from tp.layers.embedding import ParallelLMHead
from tp.layers.handles import Normed, column_parallel_input
from tp.layers.sharded_logits import ShardedLogits, log_sum_exp
from tp.parallel.group import TensorParallelGroup

IGNORE_INDEX = -100
"""Label of a token that the loss leaves out, as in torch."""
LOSS_CHUNK = 1024
"""Tokens whose logits exist at once in `chunked_head_cross_entropy`."""


def vocab_parallel_cross_entropy(
    logits: ShardedLogits,
    labels: Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    data_parallel_group: TensorParallelGroup | None = None,
    count: int | None = None,
) -> Tensor:
    """Mean loss over the valid labels of all data-parallel ranks; 0, with zero gradients, where there are none.

    The value on each rank is its own tokens' sum over the global count: the mean is the sum over data-parallel
    ranks. Statistics in float32 (float64 for float64). One collective forward, one more for a data-parallel count;
    none backward.

    Args:
        logits: [N, V], split by vocabulary.
        labels: [N] int64, equal on all ranks of the group.
        ignore_index: the label of tokens that do not count.
        label_smoothing: ε.
        data_parallel_group: other ranks with other tokens.
        count: what the sum is divided by, where the caller has counted (over micro-batches, say).

    Raises:
        LayoutError: whole logits, whose loss would come out too large by log t.
        RequestError: labels of another shape, or outside the vocabulary; on all ranks together.
    """
    if not isinstance(logits, ShardedLogits):
        raise LayoutError(f"the sharded loss takes ShardedLogits, not a {type(logits).__name__} of whole logits")
    divisor = count or valid_label_count(labels, logits.vocab_size, ignore_index, data_parallel_group)
    if labels.shape != logits.local.shape[:-1]:
        raise RequestError(f"labels are {tuple(labels.shape)}, logits {tuple(logits.local.shape)}: one label a row")
    loss: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.local, labels, logits.group, logits.vocab_size, ignore_index, label_smoothing
    )
    return loss / divisor


def chunked_head_cross_entropy(
    head: ParallelLMHead,
    x: Tensor | Normed,
    labels: Tensor,
    *,
    chunk_size: int = LOSS_CHUNK,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    data_parallel_group: TensorParallelGroup | None = None,
    count: int | None = None,
) -> Tensor:
    """The LM head and its loss in one, `chunk_size` tokens at a time: never more logits than that exist at once.

    Gradients of the head and of x are made in the forward, chunk by chunk, and scaled in the backward. Value,
    arguments and errors as `vocab_parallel_cross_entropy` of `head(x)`; one collective forward a chunk.
    """
    whole = column_parallel_input(x, head.group)
    if labels.shape != whole.shape[:-1]:
        raise RequestError(f"labels are {tuple(labels.shape)} for states {tuple(whole.shape)}: one label a row")
    divisor = count or valid_label_count(labels, head.vocab_size, ignore_index, data_parallel_group)
    loss: Tensor = _ChunkedHeadCrossEntropy.apply(  # type: ignore[no-untyped-call]
        whole, head.weight.to(whole.dtype), labels, head.group, head.vocab_size, ignore_index, label_smoothing,
        chunk_size,
    )  # fmt: skip
    return loss / divisor


def valid_label_count(
    labels: Tensor,
    vocab_size: int,
    ignore_index: int = IGNORE_INDEX,
    data_parallel_group: TensorParallelGroup | None = None,
) -> int:
    """Labels that count, over all data-parallel ranks; at least 1.

    Raises:
        RequestError: a label outside the vocabulary that is not `ignore_index`, on whatever rank, raised on all.
    """
    valid = labels != ignore_index
    outside = valid & ((labels < 0) | (labels >= vocab_size))
    counts = torch.stack([valid.sum(), outside.sum()])
    if data_parallel_group is not None:
        counts = data_parallel_group.communicator.all_reduce(counts)
    if counts[1] > 0:
        worst = labels[outside].tolist()[:3]
        raise RequestError(f"{int(counts[1])} labels are outside 0..{vocab_size - 1} (here {worst})")
    return max(1, int(counts[0]))


def _loss_and_gradient(
    logits: ShardedLogits, labels: Tensor, ignore_index: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Sum of the losses of these tokens in the statistics dtype, and d(sum)/d(local logits) in theirs."""
    local, num_valid, vocab_size = logits.local, logits.num_valid, logits.vocab_size
    targets = labels - logits.vocab_start_index
    own = shard_statistics(local, targets, num_valid)
    maxima, sums, at_target, totals = logits.group.communicator.all_gather_stacked(own).unbind(1)
    top, log_sum = log_sum_exp(maxima, sums)
    valid = labels != ignore_index
    nll = log_sum - (at_target.sum(0) - top)
    smooth = log_sum - (totals.sum(0) / vocab_size - top)
    loss = ((1 - smoothing) * nll + smoothing * smooth).where(valid, 0).sum()
    return loss, shard_gradient(local, targets, num_valid, top, log_sum, valid, smoothing, vocab_size)


class _CrossEntropy(torch.autograd.Function):
    """Sum of the losses; the gradient of the logits is made in the forward and scaled in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        labels: Tensor,
        group: TensorParallelGroup,
        vocab_size: int,
        ignore_index: int,
        smoothing: float,
    ) -> Tensor:
        logits = ShardedLogits(local, group, vocab_size)
        loss, gradient = _loss_and_gradient(logits, labels, ignore_index, smoothing)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * d_loss.to(gradient.dtype), None, None, None, None, None


class _ChunkedHeadCrossEntropy(torch.autograd.Function):
    """Sum of the losses of logits = x Wᵀ, chunk by chunk; dx = dlogits W and dW = dlogitsᵀ x made on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        group: TensorParallelGroup,
        vocab_size: int,
        ignore_index: int,
        smoothing: float,
        chunk_size: int,
    ) -> Tensor:
        wide = statistics_dtype(x.dtype)
        d_x = torch.empty_like(x)
        d_weight = torch.zeros_like(weight, dtype=wide)
        total = x.new_zeros((), dtype=wide)
        for start in range(0, len(x), chunk_size):
            rows = slice(start, start + chunk_size)
            logits = ShardedLogits(functional.linear(x[rows], weight), group, vocab_size)
            loss, gradient = _loss_and_gradient(logits, labels[rows], ignore_index, smoothing)
            d_x[rows] = gradient @ weight
            d_weight += gradient.T @ x[rows]
            total += loss
        ctx.save_for_backward(d_x, d_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        d_x, d_weight = (gradient * d_loss.to(gradient.dtype) for gradient in ctx.saved_tensors)
        return d_x, d_weight, None, None, None, None, None, None
