"""Grouped-query attention over this rank's heads, for flattened batches with or without a KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from tp.config import ModelConfig
from tp.kernels.rotary import apply_rotary
from tp.layers.handles import Normed, Partial
from tp.layers.kv_cache import LayerCache
from tp.layers.linear import FeatureShares, QKVParallelLinear, RowParallelLinear
from tp.layers.norm import HeadRMSNorm
from tp.layers.step import SequenceSlice, Step
from tp.parallel.group import TensorParallelGroup
from tp.parallel.partition import HeadRun, query_head_ranges, uniform_runs


class GroupedQueryAttention(nn.Module):
    """a = o_proj(softmax(q kᵀ / √d, causal, within the window) v), a KV head serving several query heads.

    Args:
        config: global sizes; this rank's heads follow from the group.
        window: how many last positions (the own included) a token sees; None = all.
    """

    def __init__(
        self,
        config: ModelConfig,
        window: int | None,
        group: TensorParallelGroup,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_kv_heads, config.head_dim
        self.head_dim = head_dim
        self.window = window
        self.runs = uniform_runs(heads, kv_heads, group.size, group.rank)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, head_dim, heads, kv_heads, group, bias=config.qkv_bias, dtype=dtype, device=device
        )
        self.o_proj = RowParallelLinear(
            heads * head_dim,
            config.hidden_size,
            group,
            bias=config.attention_output_bias,
            shares=FeatureShares("", query_head_ranges(heads, group.size), head_dim, heads),
            dtype=dtype,
            device=device,
        )
        self.q_norm: HeadRMSNorm | None = None
        self.k_norm: HeadRMSNorm | None = None
        if config.qk_norm:
            self.q_norm = HeadRMSNorm(head_dim, config.norm_eps, group, dtype=dtype, device=device)
            self.k_norm = HeadRMSNorm(head_dim, config.norm_eps, group, dtype=dtype, device=device)

    def forward(
        self, x: Tensor | Normed, step: Step, rotary: tuple[Tensor, Tensor], cache: LayerCache | None = None
    ) -> Partial:
        """[N, D] → this rank's addend of [N, D].

        Args:
            rotary: cos and sin of the step's tokens, from `RotaryEmbedding`.
            cache: keys and values of earlier tokens; extended by the step's. Without it every sequence starts here.
        """
        fused = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        q_NHd, k_NHd, v_NHd = fused.split([size // self.head_dim for size in self.qkv_proj.local_sizes], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_NHd, k_NHd = self.q_norm(q_NHd), self.k_norm(k_NHd)
        q_NHd, k_NHd = apply_rotary(q_NHd, *rotary), apply_rotary(k_NHd, *rotary)
        z_NHd = attend_step(q_NHd, k_NHd, v_NHd, step, self.runs, self.window, cache)
        partial_sum: Partial = self.o_proj(z_NHd.flatten(1))
        return partial_sum


def attend_step(
    q_NHd: Tensor,
    k_NHd: Tensor,
    v_NHd: Tensor,
    step: Step,
    runs: Sequence[HeadRun],
    window: int | None,
    cache: LayerCache | None,
) -> Tensor:
    """Causal attention of each sequence of the step to itself and to its cached tokens; [N, H, d]."""
    outputs = []
    for piece, rows in zip(step.sequences, step.rows(), strict=True):
        q_HTd, k_HTd, v_HTd = (x[rows.start : rows.stop].transpose(0, 1) for x in (q_NHd, k_NHd, v_NHd))
        if cache is not None:
            k_HTd, v_HTd = cache.append(piece, k_HTd, v_HTd)
        outputs.append(attend_sequence(q_HTd, k_HTd, v_HTd, piece, runs, window).transpose(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def attend_sequence(
    q_HTd: Tensor, k_HSd: Tensor, v_HSd: Tensor, piece: SequenceSlice, runs: Sequence[HeadRun], window: int | None
) -> Tensor:
    """The last T tokens of one sequence attend to its S tokens; [H, T, d].

    Expanding KV heads by index is several times slower than a loop over (at most three) uniform runs.
    """
    num_keys = k_HSd.shape[1]
    first_key = 0 if window is None else max(0, num_keys - piece.length - window + 1)
    k_HSd, v_HSd = k_HSd[:, first_key:], v_HSd[:, first_key:]
    mask = _causal_mask(piece.length, k_HSd.shape[1], window, q_HTd.device)
    outputs = []
    for run in runs:
        kv_heads, per_kv_head = len(run.kv_heads), run.queries_per_kv_head
        q = q_HTd[run.queries.start : run.queries.stop].unflatten(0, (kv_heads, per_kv_head))
        k = k_HSd[run.kv_heads.start : run.kv_heads.stop].unsqueeze(1)
        v = v_HSd[run.kv_heads.start : run.kv_heads.stop].unsqueeze(1)
        if piece.length == 1:  # the query heads of a KV head are to it as so many unmasked queries
            z = functional.scaled_dot_product_attention(q.transpose(1, 2), k, v).transpose(1, 2)
        else:
            k, v = k.expand(-1, per_kv_head, -1, -1), v.expand(-1, per_kv_head, -1, -1)
            z = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        outputs.append(z.flatten(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """[T, S] bool, True where query i (the last T of the S positions) may see key j; None where plain causal serves."""
    if num_queries == 1 or (num_queries == num_keys and (window is None or window >= num_keys)):
        return None
    query = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(-1)
    key = torch.arange(num_keys, device=device)
    visible = key <= query
    return visible if window is None else visible & (key > query - window)
