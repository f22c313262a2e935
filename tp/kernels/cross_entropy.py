"""One rank's part of the vocabulary-parallel cross-entropy: statistics of its columns, then their gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from tp.kernels.statistics import statistics_dtype
from tp.kernels.triton.use import uses_triton


def shard_statistics(logits: Tensor, targets: Tensor, num_valid: int) -> Tensor:
    """[4, N] in the statistics dtype: maximum m, Σ exp(z − m), z at the target, Σ z; over the valid columns alone.

    A rank without valid columns gives the lowest finite value as its maximum, never −∞, and zeros.

    Args:
        logits: z, [N, columns] of this rank; only read.
        targets: [N] int64, the target as a column of this rank; any number outside 0..num_valid−1 where it is
            another rank's, whose z at the target is 0 here.
        num_valid: columns that are no padding.
    """
    if not uses_triton("cross_entropy", logits):
        return plain_shard_statistics(logits, targets, num_valid)
    from tp.kernels.triton import cross_entropy

    return cross_entropy.shard_statistics(logits, targets, num_valid)


def shard_gradient(
    logits: Tensor,
    targets: Tensor,
    num_valid: int,
    top: Tensor,
    log_sum: Tensor,
    valid: Tensor,
    smoothing: float,
    vocab_size: int,
) -> Tensor:
    """dz of the sum of the losses, [N, columns] in the dtype of the logits.

    dz_v = exp(z_v − top − log_sum) − (1 − ε) · [v = target] − ε / V, accumulated in the statistics dtype and rounded
    once; exactly 0 in rows that are not valid and in padding columns, whatever the logits there.

    Args:
        logits, targets, num_valid: as for `shard_statistics`.
        top: [N], the maximum over all ranks; log_sum: [N], log Σ_v exp(z_v − top) over all ranks.
        valid: [N] bool, rows whose label counts.
        smoothing: ε.
        vocab_size: V.
    """
    if not uses_triton("cross_entropy", logits):
        return plain_shard_gradient(logits, targets, num_valid, top, log_sum, valid, smoothing, vocab_size)
    from tp.kernels.triton import cross_entropy

    return cross_entropy.shard_gradient(
        logits, targets, num_valid, top, log_sum, valid, 1 - smoothing, smoothing / vocab_size
    )


def target_logits(logits: Tensor, targets: Tensor, num_valid: int) -> Tensor:
    """[N], z at the target where it is this rank's, else 0; arguments as for `shard_statistics`."""
    owned = (targets >= 0) & (targets < num_valid)
    return logits.gather(-1, targets.where(owned, 0).unsqueeze(-1)).squeeze(-1).where(owned, 0)


def plain_shard_statistics(logits: Tensor, targets: Tensor, num_valid: int) -> Tensor:
    """`shard_statistics` in torch operations."""
    real = logits[..., :num_valid].to(statistics_dtype(logits.dtype))
    if not num_valid:
        nothing = real.new_zeros(targets.shape)
        return torch.stack([nothing + torch.finfo(real.dtype).min, nothing, nothing, nothing])
    maximum = real.amax(-1)
    sum_exp = (real - maximum.unsqueeze(-1)).exp_().sum(-1)
    return torch.stack([maximum, sum_exp, target_logits(real, targets, num_valid), real.sum(-1)])


def plain_shard_gradient(
    logits: Tensor,
    targets: Tensor,
    num_valid: int,
    top: Tensor,
    log_sum: Tensor,
    valid: Tensor,
    smoothing: float,
    vocab_size: int,
) -> Tensor:
    """`shard_gradient` in torch operations."""
    gradient = torch.zeros_like(logits, memory_format=torch.contiguous_format)
    if not num_valid:
        return gradient
    value = (logits[..., :num_valid] - top.unsqueeze(-1)).sub_(log_sum.unsqueeze(-1)).exp_()
    value -= smoothing / vocab_size
    owned = (targets >= 0) & (targets < num_valid)
    hit = ((smoothing - 1) * owned.to(value.dtype)).unsqueeze(-1)
    value.scatter_add_(-1, targets.where(owned, 0).unsqueeze(-1), hit)
    gradient[..., :num_valid] = value.where(valid.unsqueeze(-1), 0)
    return gradient
