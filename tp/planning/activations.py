"""Bytes of activations: what a decoder layer keeps for the backward, and what a step without gradients holds at once.

Counted as Korthikanti et al. 2022 (arXiv:2205.05198) count theirs, for this decoder: grouped-query attention whose
weights are not materialised, no dropout. With N tokens, s of them in this rank's share of the stream (N/t under
sequence parallelism), Q, K, I this rank's query, KV and intermediate widths, and e bytes an element, a layer keeps

    norms        s · (D·e + 4) each     what each norm read, and its float32 statistic (LayerNorm has two)
    projections  2 · s · D·e            what the q|k|v and gate|up linears read
    attention    N · (2Q + 2K) · e      q, k, v, and the kernel's output, which the output projection reads
                 + N · (Q + 2K) · e     with per-head q/k norms: q|k|v, a part of which they read
                 + N · (heads + KV heads) · 4    and their float32 statistics
                 + N · Q · e            where the rank's heads fall into several runs, whose outputs are joined by copy
                 + N · heads · 4        the float32 log-sum-exp of each row
    MLP          N · 3I · e             gate and up, and what the down projection reads
                 N · 2I · e             without a gate; N · I · e with ReLU, whose output tells its gradient

Without gradients nothing is kept. All the time a step holds the stream and its norm, and cos and sin of its positions
(2·s·D + 2·N·head_dim); beside these the most of

    attention    N · (4Q + 3K)          q|k|v, rotated q and k, the kernel's output, joined from that of each sequence
                 + N · (Q + K)          normed q and k, with per-head norms
                 or N · (D + Q + 2K)    where the stream is sharded: the gathered input and q|k|v
    write        N · (Q + D) − s·D      what the output projection read and the partial sum; the norm is gone
                 or N · D + s·D         the partial sum and the next stream, whose norm is the one that is held
    MLP          N · 3I                 gate and up, what the down projection reads
                 or N · (D + 2I)        where the stream is sharded: the gathered input beside gate and up

Copies that kernels and collectives make meanwhile are not counted, nor what norms of the write add, or after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tp.config import ModelConfig
from tp.models.norm_placement import PLACEMENTS
from tp.parallel.partition import (
    ceil_div,
    chunk_ranges,
    feature_ranges,
    kv_head_ranges,
    query_head_ranges,
    uniform_runs,
)
from tp.planning.parameters import VECTORS_OF_NORM, RankModel

STATISTIC_BYTES = 4


@dataclass(frozen=True)
class LayerActivations:
    """Bytes that one layer keeps for the backward on one rank.

    Attributes:
        stream: what norms and column-parallel linears keep of the residual stream's width; 1/t of it when sharded.
        attention: between the q|k|v projection and the output projection, that one's input included.
        mlp: between the gate|up projection and the down projection, that one's input included.
    """

    stream: int
    attention: int
    mlp: int

    @property
    def total(self) -> int:
        return self.stream + self.attention + self.mlp


def layer_activations(
    config: ModelConfig, num_tokens: int, itemsize: int, tp_size: int = 1, tp_rank: int = 0, *, sharded: bool = False
) -> LayerActivations:
    """What one layer keeps for `num_tokens` tokens in one sequence, on rank `tp_rank` of `tp_size`.

    Args:
        itemsize: bytes of an activation element.
        sharded: sequence parallelism: this rank's tokens only in the stream.
    """
    heads = len(query_head_ranges(config.num_attention_heads, tp_size)[tp_rank])
    kv_heads = len(kv_head_ranges(config.num_attention_heads, config.num_kv_heads, tp_size)[tp_rank])
    intermediate = len(feature_ranges(config.intermediate_size, tp_size)[tp_rank])
    own_tokens = len(chunk_ranges(num_tokens, tp_size)[tp_rank]) if sharded else num_tokens
    width = config.hidden_size * itemsize
    placement = PLACEMENTS[config.norm_placement]
    norms = (len(placement.attention) + len(placement.mlp)) * (width + VECTORS_OF_NORM[config.norm] * STATISTIC_BYTES)
    runs = uniform_runs(config.num_attention_heads, config.num_kv_heads, tp_size, tp_rank)
    query_copies = 3 if len(runs) > 1 else 2
    attention_width = (query_copies * heads + 2 * kv_heads) * config.head_dim * itemsize + heads * STATISTIC_BYTES
    if config.qk_norm:
        attention_width += (heads + 2 * kv_heads) * config.head_dim * itemsize + (heads + kv_heads) * STATISTIC_BYTES
    return LayerActivations(
        stream=own_tokens * (norms + 2 * width),
        attention=num_tokens * attention_width,
        mlp=num_tokens * _kept_of_mlp(config) * intermediate * itemsize,
    )


def _kept_of_mlp(config: ModelConfig) -> int:
    """Tensors of the intermediate width."""
    if config.gated_mlp:
        return 3
    return 1 if config.activation == "relu" else 2


def step_activations(model: RankModel, tokens: int, num_logits: int, *, sharded: bool) -> int:
    """Bytes that a step without gradients holds at once, logits and the sampler's copies of them included.

    Args:
        tokens: of the step. num_logits: rows of the head.
    """
    config, width, queries, keys = model.config, model.config.hidden_size, model.query_width, model.kv_width
    own_tokens = ceil_div(tokens, model.tp_size) if sharded else tokens
    gathered = width if sharded else 0
    heads = 4 * queries + 3 * keys + (queries + keys if config.qk_norm else 0)
    attention = tokens * max(heads, gathered + queries + 2 * keys)
    write = tokens * width + max(tokens * queries - own_tokens * width, own_tokens * width)
    up = (2 if config.gated_mlp else 1) * model.parameters.intermediate
    mlp = tokens * (up + max(gathered, model.parameters.intermediate))
    held = 2 * own_tokens * width + 2 * tokens * config.head_dim
    logits = num_logits * model.parameters.head.rows * (model.precision.itemsize + 2 * STATISTIC_BYTES)
    return (held + max(attention, write, mlp)) * model.precision.itemsize + logits
