"""What a step must read, or compute, at the least: what a share of a limit is a share of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launch.benching.sweep import Case, Form, work_of
from launch.measurement.engine.requests import MATRIX_PRODUCTS, MEMORY, Limit
from tp.defaults import PREFILL_CHUNK

if TYPE_CHECKING:
    from tp.config import ModelConfig


def limit_of(case: Case) -> Limit:
    """What limits the case: memory where each token of the batch needs all weights, else matrix products."""
    return MEMORY if case.phase == "decode" else MATRIX_PRODUCTS


def amount_of(case: Case, form: Form, config: ModelConfig, step_bytes: int) -> float:
    """Of the whole model, however it is split: bytes of a decode step, FLOP of a prefill or of an optimiser step.

    Bytes are those of the weights and of the cache, as it is on average over the request's steps. FLOP are those of
    the matrix products and of attention; in training the model's, as `train` counts them.

    Args:
        step_bytes: of weights, see `launch.measurement.model_facts.ModelFacts`.
    """
    from tp.planning.parameters import distinct_ranks
    from tp.planning.precision import Precision
    from tp.planning.work import decode_work, prefill_work
    from tp.training.flops import training_flops_per_token

    batch, tokens = work_of(case, form)
    if case.phase == "train":
        return batch * tokens * training_flops_per_token(config, tokens)
    (whole,) = distinct_ranks(config, Precision.of(case.dtype), 1)
    if case.phase == "prefill":
        return sum(step.flops + step.attention_flops for step in prefill_work(whole, batch, tokens, PREFILL_CHUNK))
    # Steps 2 to new_tokens have tokens + 1 to tokens + new_tokens - 1 tokens in the cache, their own included.
    return step_bytes + decode_work(whole, batch, tokens + case.new_tokens // 2).cache_bytes
