"""Causal grouped-query attention of one sequence, over uniform runs of query heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from tp.kernels.dropout import keep_mask
from tp.kernels.prefill_attention import has_prefill_attention, prefill_attention
from tp.kernels.statistics import statistics_dtype
from tp.kernels.upcast_matmul import faster_in_float32
from tp.parallel.partition import HeadRun


@dataclass(frozen=True)
class AttentionDropout:
    """Which attention weights are dropped, by global indices, so that every degree drops the same.

    Attributes:
        probability: of a weight being dropped.
        seed: of the training step.
        site: the layer.
        first_head: global index of this rank's first query head.
        first_token, num_tokens: row of the sequence's first token in the step, and N.
    """

    probability: float
    seed: int
    site: int
    first_head: int
    first_token: int
    num_tokens: int

    def apply(self, weights_HTS: Tensor) -> Tensor:
        """Zeroes the dropped weights and scales the kept ones by 1 / (1 − probability)."""
        heads, queries, keys = (torch.arange(size, device=weights_HTS.device) for size in weights_HTS.shape)
        rows = (self.first_head + heads)[:, None] * self.num_tokens + self.first_token + queries
        kept = keep_mask(self.seed, self.site, rows.unsqueeze(-1), keys, self.probability)
        return weights_HTS.where(kept, 0) / (1 - self.probability)


def causal_attention(
    q_HTd: Tensor,
    k_HSd: Tensor,
    v_HSd: Tensor,
    runs: Sequence[HeadRun],
    window: int | None = None,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """softmax(q kᵀ / √d) v of the last T of a sequence's S tokens; [H, T, d].

    Expanding KV heads by index is several times slower than a loop over (at most three) uniform runs.

    Args:
        q_HTd: queries of this rank's heads.
        k_HSd, v_HSd: this rank's KV heads.
        runs: which query heads read which KV heads.
        window: how many last positions (the own included) a token sees; None = all.
        dropout: of attention weights, in training.
    """
    if dropout is None and has_prefill_attention(q_HTd, k_HSd, v_HSd):
        return prefill_attention(q_HTd, k_HSd, v_HSd, runs, window)
    if faster_in_float32(q_HTd):
        return causal_attention(q_HTd.float(), k_HSd.float(), v_HSd.float(), runs, window, dropout).to(q_HTd.dtype)
    num_queries, num_keys = q_HTd.shape[1], k_HSd.shape[1]
    first_key = 0 if window is None else max(0, num_keys - num_queries - window + 1)
    k_HSd, v_HSd = k_HSd[:, first_key:], v_HSd[:, first_key:]
    mask = _causal_mask(num_queries, num_keys - first_key, window, q_HTd.device)
    outputs = []
    for run in runs:
        q = q_HTd[run.queries.start : run.queries.stop].unflatten(0, (len(run.kv_heads), -1))
        k = k_HSd[run.kv_heads.start : run.kv_heads.stop].unsqueeze(1)
        v = v_HSd[run.kv_heads.start : run.kv_heads.stop].unsqueeze(1)
        if dropout is not None:
            z = _attention_with_dropout(q, k, v, mask, dropout, run)
        elif num_queries == 1:  # the query heads of a KV head are to it as so many unmasked queries
            z = functional.scaled_dot_product_attention(q.transpose(1, 2), k, v).transpose(1, 2)
        else:
            k, v = k.expand(-1, q.shape[1], -1, -1), v.expand(-1, q.shape[1], -1, -1)
            z = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        if dropout is None and z.is_cpu and not z.requires_grad:
            z[..., 0] += 0 * q.amax(-1)  # torch's kernel for CPUs makes 0 of a query that is NaN; gradients show it
        outputs.append(z.flatten(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def attention_pattern(q_HTd: Tensor, k_HSd: Tensor, runs: Sequence[HeadRun], window: int | None = None) -> Tensor:
    """The weights softmax(q kᵀ / √d) of `causal_attention`, for looking at: [H, T, S], float32 at least, no gradients.

    Args:
        q_HTd, k_HSd, runs, window: as `causal_attention` takes them.
    """
    mask = _visible(q_HTd.shape[1], k_HSd.shape[1], window, q_HTd.device)
    dtype = statistics_dtype(q_HTd.dtype)
    patterns = []
    for run in runs:
        q = q_HTd[run.queries.start : run.queries.stop].to(dtype).unflatten(0, (len(run.kv_heads), -1))
        k = k_HSd[run.kv_heads.start : run.kv_heads.stop].to(dtype).unsqueeze(1)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        patterns.append(scores.masked_fill(~mask, -torch.inf).softmax(-1).flatten(0, 1))
    return torch.cat(patterns)


def _causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """[T, S] bool, True where query i (the last T of S positions) may see key j; None where plain causal serves."""
    if num_queries == 1 or (num_queries == num_keys and (window is None or window >= num_keys)):
        return None
    return _visible(num_queries, num_keys, window, device)


def _visible(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """[T, S] bool, True where query i (the last T of S positions) may see key j."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(-1)
    key = torch.arange(num_keys, device=device)
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def _attention_with_dropout(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: AttentionDropout, run: HeadRun
) -> Tensor:
    """Weights in the statistics dtype, rounded, dropped, then multiplied with v, as transformers' eager attention."""
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    if mask is None:
        mask = _visible(num_queries, num_keys, None, q.device)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=statistics_dtype(q.dtype)).to(q.dtype)
    local = replace(dropout, first_head=dropout.first_head + run.queries.start)
    return local.apply(weights.flatten(0, 1)).view_as(weights) @ v
