"""Changes to logits before a token is chosen: plain functions on float32 rows, the arithmetic of transformers' own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tp.kernels.argmax_and_sum_exp import LOWEST

NUCLEUS_PREFIX = 1024
"""How many of the most likely tokens top-p looks at before it sorts them all."""


def repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Seen tokens' logits divided by `penalty` where positive, multiplied where negative.

    Args:
        logits: [R, K].
        seen: [R, K] bool: in the prompt or generated before.
    """
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def mask_columns(logits: Tensor, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
    """`logits` [R, K] with the given columns of the given rows at the lowest value."""
    if not rows or not columns:
        return logits
    masked = logits.clone()
    masked[torch.tensor(rows, device=logits.device).unsqueeze(1), torch.tensor(columns, device=logits.device)] = LOWEST
    return masked


def best_columns(values: Tensor, count: int) -> Tensor:
    """[R, count] int64: the columns of the highest values, best first; of equal values the lowest column comes first.

    `torch.topk` leaves open which of equal values it takes, and equal logits are common in bfloat16. So one integer is
    made of value and column: the bits of a float32 order as integers do once those of negative numbers are flipped.

    Args:
        values: [R, K] float32.
    """
    if count == 1:
        return values.argmax(-1, keepdim=True)  # the first of equal values, by its documentation
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes −0.0 equal to 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    earlier_first = torch.arange(values.shape[-1] - 1, -1, -1, device=values.device)
    keys = torch.add(earlier_first, ordered.to(torch.int64), alpha=1 << 32)
    return keys.topk(count).indices


def nucleus(logits: Tensor, top_p: float) -> Tensor:
    """[R, K] bool: the fewest most likely columns whose probabilities together reach `top_p`, at least one."""
    if top_p >= 1:
        return torch.ones_like(logits, dtype=torch.bool)
    probabilities = logits.double().softmax(-1)
    for count in (min(NUCLEUS_PREFIX, logits.shape[-1]), logits.shape[-1]):
        order = best_columns(logits, count)
        ordered = probabilities.gather(-1, order)
        up_to = ordered.cumsum(-1)
        if bool((up_to[:, -1] >= top_p).all()):
            break
    # The first one stays whatever rounding does to its predecessors' sum, which is 0.
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, up_to - ordered < top_p)


def likely_enough(logits: Tensor, min_p: float) -> Tensor:
    """[R, K] bool: columns at least `min_p` times as likely as the most likely one."""
    probabilities = logits.double().softmax(-1)
    return probabilities >= min_p * probabilities.amax(-1, keepdim=True)


def draw(logits: Tensor, kept: Tensor, uniforms: Sequence[float]) -> Tensor:
    """[R] int64: one column a row, by inverting the cumulative distribution over the kept columns in their order.

    Args:
        logits: [R, K].
        kept: [R, K] bool, at least one a row.
        uniforms: R numbers in [0, 1).
    """
    weights = (logits - logits.amax(-1, keepdim=True)).double().exp() * kept
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    targets = torch.tensor(uniforms, dtype=torch.float64, device=logits.device).unsqueeze(-1) * total
    drawn = torch.searchsorted(cumulative, targets, right=True)
    last = (cumulative < total).sum(-1, keepdim=True)  # a target rounded up to the total is past every column
    return torch.minimum(drawn, last).squeeze(-1)
