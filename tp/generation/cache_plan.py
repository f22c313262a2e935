"""How large a request's KV cache can be: as asked for where it fits, else smaller; the same on every rank."""

from __future__ import annotations

from tp.layers.kv_cache import KVCache
from tp.models.causal_lm import CausalLM


def tokens_that_fit(model: CausalLM, free_bytes: int) -> int:
    """Tokens, over all slots, that a cache of so many bytes on this rank holds."""
    return free_bytes // KVCache.bytes_needed(model.config, model.group, 1, 1, model.dtype)


def plan_cache(tokens: int, num_slots: int, capacity: int, needed: int) -> tuple[int, int]:
    """(slots, capacity of each) that fit, as near as possible to those asked for.

    First the slots get shorter, down to the tokens needed; then there are fewer, and prompts take turns.

    Args:
        tokens: that fit on the rank with the least room; at least `needed`.
        num_slots, capacity: asked for.
        needed: tokens that the longest sequence may come to.
    """
    if num_slots * capacity <= tokens:
        return num_slots, capacity
    if num_slots * needed <= tokens:
        return num_slots, tokens // num_slots
    return tokens // needed, needed
