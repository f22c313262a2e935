"""How likely a model finds a text: log-probabilities and perplexity, without a gather of the vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tp.errors import NumericalError, RequestError
from tp.generation.not_finite import ADVICE, locate_non_finite
from tp.generation.options import GenerationOptions
from tp.generation.request import Prompt, Request, encode_prompts, share_request, statement_of_prompts
from tp.generation.text_model import TextModel
from tp.kernels.argmax_and_sum_exp import argmax_and_sum_exp
from tp.kernels.cross_entropy import target_logits
from tp.layers.kv_cache import KVCache
from tp.layers.sharded_logits import ShardedLogits, log_sum_exp
from tp.layers.step import SequenceSlice, Step

ROWS = 64
"""Positions whose logits exist at once: float32 [64, ⌈V/t⌉]."""


@dataclass(frozen=True)
class Score:
    """How likely a model finds a text.

    Attributes:
        token_ids: n ids.
        logprobs: n − 1 natural logarithms: of each id but the first, given those before it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def perplexity(self) -> float:
        """exp(−mean log-probability); infinite where a float cannot hold it."""
        try:
            return math.exp(-sum(self.logprobs) / len(self.logprobs))
        except OverflowError:
            return math.inf


@torch.no_grad()
def score(model: TextModel, text: Prompt | None) -> Score:
    """The log-probability of each token given those before it. Every rank calls it and gets the same.

    The text runs through the model in chunks, through the LM head `ROWS` positions at a time, and each rank's
    statistics of its columns of the vocabulary are all that is exchanged.

    Args:
        text: text or token ids, those of rank 0; other ranks may pass None.

    Raises:
        RequestError: fewer than two tokens, ids outside the vocabulary, or more tokens than the context takes.
        CapacityError: the KV cache does not fit.
        NumericalError: the logits are not finite; on every rank, naming where they first arise.
        CommunicationError: ranks whose models or texts differ; on every rank.
    """
    asked = {"call": "score"} | statement_of_prompts(None if text is None else [text])
    request = share_request(model, lambda: _scoring_request(model, text), asked)
    ids = torch.tensor(request.prompts[0], device=model.group.device)
    cache = KVCache(model.config, model.group, 1, request.capacity, dtype=model.dtype, device=model.group.device)
    logprobs: list[float] = []
    chunk = request.options.prefill_chunk
    for start in range(0, len(ids) - 1, chunk):
        inputs = ids[start : start + chunk][: len(ids) - 1 - start]
        piece = SequenceSlice(len(inputs), start, slot=0, total=len(ids))
        normed = model.model.final_norm(model.residual_stream(Step(inputs, (piece,)), cache))
        targets = ids[start + 1 : start + 1 + len(inputs)]
        for rows in torch.arange(len(inputs), device=ids.device).split(ROWS):
            logits = model.lm_head(normed.select(rows))
            logprobs += token_logprobs(logits, targets[rows]).tolist()
        bad = next((index for index in range(start, len(logprobs)) if not math.isfinite(logprobs[index])), None)
        if bad is not None:
            where = locate_non_finite(model, cache, ids[: start + len(inputs)], 0, chunk)
            raise NumericalError(f"the logits after token {bad} are not finite, {where}: {ADVICE}")
    return Score(request.prompts[0], tuple(logprobs))


def token_logprobs(logits: ShardedLogits, targets: Tensor) -> Tensor:
    """[R] float32: ln softmax(logits)[target], equal on all ranks; one all-gather of three numbers a row and rank.

    Args:
        logits: [R, V]; float32 statistics whatever their dtype.
        targets: [R] int64.
    """
    best = argmax_and_sum_exp(logits.valid)
    own_targets = target_logits(logits.local, targets - logits.vocab_start_index, logits.num_valid).float()
    packed = torch.cat([best.highest, best.sum_exp, own_targets.unsqueeze(-1)], dim=-1)
    maxima, sums, at_target = logits.group.communicator.all_gather_stacked(packed).unbind(-1)
    top, log_sum = log_sum_exp(maxima, sums)
    return at_target.sum(0) - top - log_sum


def _scoring_request(model: TextModel, text: Prompt | None) -> Request:
    (ids,) = encode_prompts(model, None if text is None else [text])
    if not 2 <= len(ids) <= model.context:
        raise RequestError(f"the text has {len(ids)} tokens: scoring takes 2 to {model.context}, the model's context")
    return Request((ids,), GenerationOptions(), model.context, needed=len(ids), num_slots=1, capacity=len(ids))
