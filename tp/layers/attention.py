"""Grouped-query attention over this rank's heads, for flattened batches with or without a KV cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tp.config import ModelConfig
from tp.kernels.attention import AttentionDropout, attention_pattern, causal_attention
from tp.kernels.cache_attention import QueryGroups
from tp.kernels.decode_attention import decode_attention, has_decode_attention
from tp.kernels.rotary import rotate_queries_and_keys
from tp.layers.handles import LinearPartial, Normed
from tp.layers.kv_cache import LayerCache
from tp.layers.linear import FeatureShares, QKVParallelLinear, RowParallelLinear
from tp.layers.norm import HeadRMSNorm
from tp.layers.step import Step
from tp.layers.tap import Tap
from tp.parallel.group import TensorParallelGroup
from tp.parallel.partition import query_head_ranges, uniform_runs


class GroupedQueryAttention(nn.Module):
    """a = o_proj(softmax(q kᵀ / √d, causal, within the window) v), a KV head serving several query heads.

    Args:
        config: global sizes; this rank's heads follow from the group.
        layer: index of the layer, which decides its window and its dropout.

    Attributes:
        heads: the global indices of this rank's query heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        group: TensorParallelGroup,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_kv_heads, config.head_dim
        self.head_dim = head_dim
        self.layer = layer
        self.window = config.sliding_windows[layer]
        self.dropout_probability = config.attention_dropout
        self.heads = query_head_ranges(heads, group.size)[group.rank]
        self.runs = uniform_runs(heads, kv_heads, group.size, group.rank)
        self._query_groups = QueryGroups.of_runs(self.runs, group.device)
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
        self,
        x: Tensor | Normed,
        step: Step,
        rotary: tuple[Tensor, Tensor],
        cache: LayerCache | None = None,
        tap: Tap | None = None,
    ) -> LinearPartial:
        """[N, D] → this rank's addend of [N, D].

        Args:
            rotary: cos and sin of the step's tokens, from `RotaryEmbedding`.
            cache: keys and values of earlier tokens; extended by the step's. Without it every sequence starts here.
            tap: sees the heads' outputs, and the attention weights if it wants them.
        """
        fused = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        q_NHd, k_NHd, v_NHd = fused.split([size // self.head_dim for size in self.qkv_proj.local_sizes], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_NHd, k_NHd = self.q_norm(q_NHd), self.k_norm(k_NHd)
        if cache is not None and self._decodes(step, q_NHd):
            z_NHd = decode_attention(
                q_NHd, k_NHd, v_NHd, rotary, (cache.key, cache.value), step.slots, step.starts,
                self._groups(q_NHd.device), self.window,
            )  # fmt: skip
        else:
            z_NHd = self._attend(*rotate_queries_and_keys(q_NHd, k_NHd, *rotary), v_NHd, step, cache)
        if tap is not None:
            if tap.wants_pattern(self.layer):
                self._show_pattern(tap, q_NHd, k_NHd, rotary, step, cache)
            z_NHd = tap.on_heads(self.layer, z_NHd, self.heads)
        partial_sum: LinearPartial = self.o_proj(z_NHd.flatten(1))
        return partial_sum

    def _groups(self, device: torch.device) -> QueryGroups:
        """The query heads of each of this rank's KV heads, with their bounds on the device."""
        if self._query_groups.bounds.device != device:
            self._query_groups = QueryGroups.of_runs(self.runs, device)
        return self._query_groups

    def _decodes(self, step: Step, q_NHd: Tensor) -> bool:
        """Whether the kernel for decode steps serves this one."""
        return step.decodes and not torch.is_grad_enabled() and has_decode_attention(q_NHd.dtype, q_NHd.device)

    def _attend(self, q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor, step: Step, cache: LayerCache | None) -> Tensor:
        """Each sequence of the step to itself and to its cached tokens; [N, H, d]."""
        if torch.is_grad_enabled():
            v_NHd = v_NHd.contiguous()  # a view would keep the fused q|k|v alive until the backward
        outputs = []
        for piece, rows in zip(step.sequences, step.rows(), strict=True):
            q_HTd, k_HTd, v_HTd = (x[rows.start : rows.stop].transpose(0, 1) for x in (q_NHd, k_NHd, v_NHd))
            if cache is not None:
                k_HTd, v_HTd = cache.append(piece, k_HTd, v_HTd)
            dropout = self._dropout(step, rows.start)
            outputs.append(causal_attention(q_HTd, k_HTd, v_HTd, self.runs, self.window, dropout).transpose(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    @torch.no_grad()
    def _show_pattern(
        self,
        tap: Tap,
        q_NHd: Tensor,
        k_NHd: Tensor,
        rotary: tuple[Tensor, Tensor],
        step: Step,
        cache: LayerCache | None,
    ) -> None:
        """Gives the tap the attention weights of each sequence; the cache, if any, holds the step's keys already."""
        q_NHd, k_NHd = rotate_queries_and_keys(q_NHd, k_NHd, *rotary)
        for index, (piece, rows) in enumerate(zip(step.sequences, step.rows(), strict=True)):
            q_HTd, k_HSd = (x[rows.start : rows.stop].transpose(0, 1) for x in (q_NHd, k_NHd))
            if cache is not None:
                k_HSd = cache.key[piece.slot, :, : piece.start + piece.length]
            tap.on_pattern(self.layer, index, attention_pattern(q_HTd, k_HSd, self.runs, self.window), self.heads)

    def _dropout(self, step: Step, first_token: int) -> AttentionDropout | None:
        if not self.training or self.dropout_probability == 0 or step.dropout_seed is None:
            return None
        return AttentionDropout(
            self.dropout_probability, step.dropout_seed, self.layer, self.heads.start, first_token, step.num_tokens
        )
