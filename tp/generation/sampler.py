"""From vocabulary-parallel logits to the next tokens, gathering no more of the vocabulary than the choice needs.

Greedy and top-k: each rank takes its best k, and one all-gather brings the candidates together with what the
log-normaliser needs. Drawing from the whole distribution, or from its nucleus, gathers the rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tp.generation.draws import uniform
from tp.generation.options import GenerationOptions
from tp.generation.processors import (
    best_columns,
    draw,
    likely_enough,
    mask_columns,
    nucleus,
    repetition_penalty,
)
from tp.generation.scheduler import SequenceState
from tp.kernels.argmax_and_sum_exp import argmax_and_sum_exp
from tp.layers.sharded_logits import ShardedLogits, log_sum_exp


@dataclass(frozen=True)
class Candidates:
    """What may be chosen, in ascending order of id.

    Attributes:
        ids: [R, K] int64.
        raw: [R, K] float32, the model's logits.
        processed: [R, K] float32, after penalty and masks.
        log_normaliser: [R] float32, ln Σ exp over the whole vocabulary of the model's logits.
    """

    ids: Tensor
    raw: Tensor
    processed: Tensor
    log_normaliser: Tensor


class Sampler:
    """Chooses the next token of each sequence, in two halves: one that every rank calls, one for rank 0.

    Args:
        options: of the request.
        end_ids: ids to mask until min_new_tokens is reached.
        vocab_size: V.
    """

    def __init__(self, options: GenerationOptions, end_ids: Collection[int], vocab_size: int) -> None:
        self._sampling = options.sampling
        self._min_new_tokens = options.min_new_tokens
        self._end_ids = sorted(end_ids)
        self._vocab_size = vocab_size
        self._seen: dict[int, Tensor] = {}

    def candidates(self, logits: ShardedLogits, states: Sequence[SequenceState]) -> Candidates | None:
        """What may be chosen, on rank 0; elsewhere None. The one collective of a choice: every rank calls it.

        Args:
            logits: [R, V], one row a sequence.
            states: the sequences; their tokens so far decide penalties and masks.
        """
        wanted = 1 if self._sampling.greedy else self._sampling.top_k
        if wanted:
            return self._best_candidates(logits, states, min(wanted, logits.vocab_size))
        return self._all_candidates(logits, states)

    def choose(self, candidates: Candidates, states: Sequence[SequenceState]) -> list[tuple[int, float]]:
        """(token id, log-probability in the model's own distribution) for each row; no collective.

        The log-probability is NaN where any logit of the row is not finite.
        """
        sampling = self._sampling
        if sampling.greedy:
            columns = best_columns(candidates.processed, 1)
        else:
            best = candidates.processed.amax(-1, keepdim=True)
            scores = (candidates.processed - best) / sampling.temperature  # in this order nothing overflows
            kept = nucleus(scores, sampling.top_p)
            if sampling.min_p:
                kept &= likely_enough(scores, sampling.min_p)
            uniforms = [uniform(sampling.seed, state.index, len(state.new_ids)) for state in states]
            columns = draw(scores, kept, uniforms).unsqueeze(-1)
        ids = candidates.ids.gather(-1, columns).squeeze(-1).tolist()
        logprobs = (candidates.raw.gather(-1, columns).squeeze(-1) - candidates.log_normaliser).tolist()
        return list(zip(ids, logprobs, strict=True))

    def forget(self, state: SequenceState) -> None:
        """Frees what is kept for a sequence that has finished."""
        self._seen.pop(state.index, None)

    def _best_candidates(self, logits: ShardedLogits, states: Sequence[SequenceState], count: int) -> Candidates | None:
        """The `count` best of each row: each rank's best and its share of Σ exp travel in one all-gather."""
        best = argmax_and_sum_exp(logits.valid)
        columns, raw, processed = best.columns, best.highest, best.highest
        if count > 1 or self._alters(states):
            columns, raw, processed = self._best_columns(logits, states, count)
        floats = torch.cat([best.highest, best.sum_exp, raw, processed], dim=-1)
        ids = (columns + logits.vocab_start_index).to(torch.int32)
        packed = torch.cat([floats.view(torch.int32), ids], dim=-1)  # one payload: floats as their bits
        gathered = logits.group.communicator.all_gather_stacked(packed)
        return _merge(gathered, count) if logits.group.rank == 0 else None

    def _best_columns(
        self, logits: ShardedLogits, states: Sequence[SequenceState], count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's `count` best columns of each row, what they hold, and what became of that; each [R, k]."""
        raw = logits.local.float()
        processed = logits.padded(self._process(raw[:, : logits.num_valid], logits.vocab_start_index, states))
        columns = best_columns(processed, min(count, raw.shape[-1]))
        return columns, raw.gather(-1, columns), processed.gather(-1, columns)

    def _all_candidates(self, logits: ShardedLogits, states: Sequence[SequenceState]) -> Candidates | None:
        whole = logits.whole()
        if logits.group.rank != 0:
            return None
        raw = whole.float()
        ids = torch.arange(logits.vocab_size, device=raw.device).expand_as(raw)
        best = argmax_and_sum_exp(whole)
        log_normaliser = (best.highest + best.sum_exp.log()).squeeze(-1)
        return Candidates(ids, raw, self._process(raw, 0, states), log_normaliser)

    def _alters(self, states: Sequence[SequenceState]) -> bool:
        """Whether `_process` changes anything."""
        masks = bool(self._end_ids) and any(len(state.new_ids) < self._min_new_tokens for state in states)
        return masks or self._sampling.repetition_penalty != 1

    def _process(self, logits: Tensor, first_id: int, states: Sequence[SequenceState]) -> Tensor:
        """Penalty and masks on the columns [first_id, first_id + K) of the vocabulary."""
        stop_id = first_id + logits.shape[-1]
        if self._sampling.repetition_penalty != 1:
            seen = torch.stack([self._seen_ids(state, logits.device)[first_id:stop_id] for state in states])
            logits = repetition_penalty(logits, seen, self._sampling.repetition_penalty)
        rows = [row for row, state in enumerate(states) if len(state.new_ids) < self._min_new_tokens]
        columns = [end_id - first_id for end_id in self._end_ids if first_id <= end_id < stop_id]
        return mask_columns(logits, rows, columns)

    def _seen_ids(self, state: SequenceState, device: torch.device) -> Tensor:
        """[V] bool: ids in the sequence's prompt or among its new tokens."""
        if state.index not in self._seen:
            self._seen[state.index] = torch.zeros(self._vocab_size, dtype=torch.bool, device=device)
            self._seen[state.index][torch.tensor([*state.prompt_ids, *state.new_ids], device=device)] = True
        seen = self._seen[state.index]
        if state.new_ids:  # one more since the last step
            seen[state.new_ids[-1]] = True
        return seen


def _merge(gathered: Tensor, count: int) -> Candidates:
    """The `count` best of all ranks' candidates.

    Args:
        gathered: [t, R, 2 + 3k] int32: max, Σ exp(x − max), k raw, k processed (the bits of float32), k ids.
    """
    per_rank = (gathered.shape[-1] - 2) // 3
    floats, ids = gathered.split([2 + 2 * per_rank, per_rank], dim=-1)
    local_max, local_sum, *values = floats.view(torch.float32).split([1, 1, per_rank, per_rank], dim=-1)
    top, log_sum = log_sum_exp(local_max, local_sum)
    ids, raw, processed = (x.transpose(0, 1).flatten(1) for x in (ids.to(torch.int64), *values))
    order = ids.argsort(-1)
    ids, raw, processed = (x.gather(-1, order) for x in (ids, raw, processed))
    # Padding has the lowest value and the last ids: it loses every tie as well.
    best = best_columns(processed, count).sort(-1).values
    log_normaliser = (top + log_sum).squeeze(-1)
    return Candidates(ids.gather(-1, best), raw.gather(-1, best), processed.gather(-1, best), log_normaliser)
