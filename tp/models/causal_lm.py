"""The decoder with its LM head: token ids → logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tp.config import ModelConfig
from tp.errors import RequestError
from tp.layers.embedding import ParallelLMHead
from tp.layers.kv_cache import KVCache
from tp.layers.residual_stream import ResidualStream
from tp.layers.sharded_logits import ShardedLogits
from tp.layers.step import Step
from tp.models.decoder import Decoder
from tp.parallel.group import TensorParallelGroup


class CausalLM(nn.Module):
    """A decoder-only language model split over a tensor-parallel group; its paths are the Hub's names.

    Args:
        config: what to build; refused with `ConfigError` where t is above its query heads.
        group: the ranks; alone by default.
        dtype: of parameters and stream.
        device: of the parameters; build on "meta", then `tp.huge_pages.materialise` and load, to fill them once.
    """

    def __init__(
        self,
        config: ModelConfig,
        group: TensorParallelGroup | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        group = group or TensorParallelGroup.alone()
        config.check_degree(group.size)
        device = device or group.device
        self.config = config
        self.group = group
        self.model = Decoder(config, group, dtype=dtype, device=device)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, group, dtype=dtype, device=device)
        self._tie()

    def _tie(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _apply(self, fn: Any, recurse: bool = True) -> CausalLM:
        """Moves, casts or empties parameters as torch does, which may make two of a shared one: ties it again."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie()
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters and the residual stream."""
        return self.lm_head.weight.dtype

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits of a padded batch, every sequence from its beginning.

        Args:
            input_ids: [B, S] int64, equal on all ranks.
            attention_mask: [B, S], non-zero where real; padding on the left or right of a row.

        Returns:
            [B, S, V] in the model's dtype on every rank; 0 at padded positions.

        Raises:
            RequestError: wrong shapes, ids outside the vocabulary, or padding in the middle of a row.
        """
        return self.sharded_logits(input_ids, attention_mask).whole()

    def sharded_logits(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> ShardedLogits:
        """As `forward`, but the vocabulary stays split over the ranks."""
        mask = self._check_input(input_ids, attention_mask)
        logits = self.logits_of(self.residual_stream(Step.from_padded(input_ids, mask)))
        padded = logits.local.new_zeros((*input_ids.shape, logits.local.shape[-1]))
        return replace(logits, local=padded.index_put((mask,), logits.local))

    def next_token_logits(self, step: Step, cache: KVCache) -> ShardedLogits:
        """Runs a step and returns [B, V]: the logits at the last token of each of its sequences, and no others."""
        stream: ResidualStream = self.model(step, cache, None if step.decodes else step.last_rows())
        if step.decodes and not stream.layout.sharded:
            return self.logits_of(stream)
        if stream.tap is None:
            return self.logits_of(stream.take(step.last_rows()) if step.decodes else stream)
        last: ShardedLogits = self.lm_head(self.model.final_norm(stream).select(step.last_rows()))  # it sees all rows
        return last

    def extend_cache(self, step: Step, cache: KVCache) -> None:
        """Runs a step of which only the keys and values are wanted."""
        nothing = step.token_ids.new_empty(0)
        stream: ResidualStream = self.model(step, cache, nothing)
        if stream.tap is not None:  # it sees every point of every step
            self.model.final_norm(stream)

    def residual_stream(self, step: Step, cache: KVCache | None = None) -> ResidualStream:
        """Runs a step and returns the stream after the last layer, no logits computed."""
        stream: ResidualStream = self.model(step, cache)
        return stream

    def logits_of(self, stream: ResidualStream) -> ShardedLogits:
        """[N, V] of the stream's N rows: final norm, then LM head."""
        logits: ShardedLogits = self.lm_head(self.model.final_norm(stream))
        return logits

    def _check_input(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        if input_ids.dim() != 2 or input_ids.numel() == 0:
            raise RequestError(f"input_ids is {tuple(input_ids.shape)}: it must be [batch, length], neither empty")
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            shapes = f"attention_mask is {tuple(attention_mask.shape)}, input_ids is {tuple(input_ids.shape)}"
            raise RequestError(f"{shapes}: they must agree")
        mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        low, high = torch.aminmax(input_ids.where(mask, 0))
        if low < 0 or high >= self.config.vocab_size:
            raise RequestError(f"input_ids run from {int(low)} to {int(high)}: outside 0..{self.config.vocab_size - 1}")
        return mask
