"""How large a request's KV cache can be: as asked for where it fits, else smaller; the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tp.generation.not_finite import ROWS
from tp.layers.kv_cache import KVCache
from tp.models.causal_lm import CausalLM
from tp.parallel.partition import ceil_div, feature_ranges, kv_head_ranges, query_head_ranges

STATISTICS = torch.float32
"""Of logits, of which sampling makes two copies in it."""
KEPT_ON_CUDA = 32
"""One part in so many of the free memory is left for what libraries take when they are first called, for captured
steps, and for gaps between blocks."""


@dataclass(frozen=True)
class Room:
    """What one rank has, and what a request takes of it, in bytes.

    Attributes:
        free: for the cache and for steps.
        cached_token: of the cache.
        step_token: of a step, at most: for each of its tokens.
        seen_token: likewise, for each of its tokens and each that it may see: a mask, and torch's own form of it.
        logits_row: of the logits of a position, with copies.
    """

    free: int
    cached_token: int
    step_token: int
    seen_token: int
    logits_row: int

    @classmethod
    def of(cls, model: CausalLM, free_bytes: int) -> Room:
        """Of this rank. A step is counted as if a layer held all at once that it makes one after the other:

        4 D of the residual stream, 5 (Q + 2 K) of attention and 3 I of the MLP, in widths of this rank.
        """
        config, group, itemsize = model.config, model.group, model.dtype.itemsize
        heads = len(query_head_ranges(config.num_attention_heads, group.size)[group.rank])
        kv_heads = len(kv_head_ranges(config.num_attention_heads, config.num_kv_heads, group.size)[group.rank])
        attention = 5 * (heads + 2 * kv_heads) * config.head_dim
        mlp = 3 * len(feature_ranges(config.intermediate_size, group.size)[group.rank])
        kept = free_bytes // KEPT_ON_CUDA if group.device.type == "cuda" else 0
        return cls(
            free=free_bytes - kept,
            cached_token=KVCache.bytes_needed(config, group, 1, 1, model.dtype),
            step_token=(4 * config.hidden_size + attention + mlp) * itemsize,
            seen_token=torch.bool.itemsize + itemsize,
            logits_row=ceil_div(config.vocab_size, group.size) * (itemsize + 2 * STATISTICS.itemsize),
        )

    def beside_prompts(self, tokens: int, context: int) -> int:
        """What is left beside a step of so many tokens of prompts, of which each sees up to `context`."""
        of_step = tokens * (self.step_token + context * self.seen_token) + min(tokens, ROWS) * self.logits_row
        return self.free - of_step

    def for_cache(self, tokens: int, context: int, num_slots: int) -> int:
        """What is left beside that step and a token of each slot."""
        return self.beside_prompts(tokens, context) - num_slots * (self.step_token + self.logits_row)


def plan_cache(rooms: Sequence[Room], num_slots: int, capacity: int, needed: int, step_tokens: int) -> tuple[int, int]:
    """(slots, capacity of each) that fit on every rank, as near as possible to those asked for; no slots: none do.

    First the slots get shorter, down to the tokens needed; then there are fewer, and prompts take turns.

    Args:
        rooms: of all ranks.
        num_slots, capacity: asked for.
        needed: tokens that the longest sequence may come to.
        step_tokens: most tokens of prompts in a step.
    """
    fitting = min(room.for_cache(step_tokens, needed, num_slots) // (num_slots * room.cached_token) for room in rooms)
    if fitting >= needed:
        return num_slots, min(capacity, fitting)
    of_slot = ((room, room.step_token + room.logits_row + needed * room.cached_token) for room in rooms)
    return max(0, min(room.beside_prompts(step_tokens, needed) // taken for room, taken in of_slot)), needed
