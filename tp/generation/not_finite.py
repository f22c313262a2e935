"""Logits that are not finite, and the error that says where they come from."""

from __future__ import annotations

import torch
from torch import Tensor

from tp.errors import NumericalError
from tp.generation.scheduler import SequenceState
from tp.layers.kv_cache import KVCache
from tp.layers.step import SequenceSlice, Step
from tp.models.causal_lm import CausalLM
from tp.models.first_non_finite import FirstNonFinite, first_of_all, in_words
from tp.models.taps import attached

ROWS = 64
"""Positions whose logits are looked at at once."""
ADVICE = "try dtype float32 or bfloat16, or check the weights"


def not_finite(model: CausalLM, cache: KVCache, state: SequenceState, prefill_chunk: int) -> NumericalError:
    """The error for a sequence, the same on every rank, after all of its tokens have passed the model once more.

    Every rank calls it, with the sequence's slot of the cache as it was.
    """
    ids = torch.tensor([*state.prompt_ids, *state.new_ids], device=model.group.device)
    where = locate_non_finite(model, cache, ids, state.slot, prefill_chunk, decodes=bool(state.new_ids))
    return NumericalError(
        f"the logits of sequence {state.index} at new token {len(state.new_ids)} are not finite, {where}: {ADVICE}"
    )


def locate_non_finite(
    model: CausalLM, cache: KVCache, ids: Tensor, slot: int, prefill_chunk: int, *, decodes: bool = False
) -> str:
    """Where the logits at the last of `ids`, or in their last chunk, stop being finite, in words; equal on all ranks,
    which all call it.

    Args:
        ids: [N] int64, all tokens of the sequence.
        slot: of `cache`; filled anew.
        decodes: the last token goes through a step of its own.
    """
    assert len(ids)
    first = FirstNonFinite()
    in_chunks = len(ids) - 1 if decodes else len(ids)
    pieces = [*ids[:in_chunks].split(prefill_chunk), *ids[in_chunks:].split(1)]
    start = 0
    with attached(model, first):
        for piece in filter(len, pieces):
            step = Step(piece, (SequenceSlice(len(piece), start, slot, total=len(ids)),))
            start += len(piece)
            normed = model.model.final_norm(model.residual_stream(step, cache))
        for rows in torch.arange(len(step.token_ids), device=ids.device).split(ROWS):
            first.look_at_logits(model.lm_head(normed.select(rows)))
    return in_words(first_of_all(first.found, [model.group]))
