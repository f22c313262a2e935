"""bfloat16 and float16 logits against transformers' in the same dtype, teacher-forced: both are given the same tokens.

Sums of another order are rounded to other neighbours, so that the two part as two rounded copies of a model do. How far
that is, transformers tells: the distance of its own logits from those of the same weights in float32. Of two errors of
that size, independent of each other, the difference is √2 of it in the mean of squares.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny_models import TINY_CONFIGS, hub_config, parallel_model, transformers_model

from launch.default_model import EMBEDDED
from tp.layers import KVCache, SequenceSlice, Step

TOKENS = 48
TEXT = "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness "
FARTHEST = 8
"""Of a single logit, in ε of the dtype (2⁻⁷, 2⁻¹⁰) times the largest; transformers' are up to 7.6 from float32's."""


@dataclass(frozen=True)
class Reference:
    """A model whose weights are in the dtype, and transformers' logits in it and in float32, [N, V]."""

    config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    ids: torch.Tensor
    logits: torch.Tensor
    exact: torch.Tensor


def embedded_model():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, attn_implementation="eager", dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(EMBEDDED)(2 * TEXT, return_tensors="pt").input_ids[0, :TOKENS]
    return json.loads((EMBEDDED / "config.json").read_text()), model, ids


def tiny_model(family):
    model = transformers_model(family)
    ids = torch.randint(0, model.config.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(31))
    return hub_config(family), model, ids


@functools.cache
def reference(name, dtype):
    from transformers import AutoModelForCausalLM

    config, model, ids = embedded_model() if name == "embedded" else tiny_model(name)
    narrow = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager", dtype=dtype).eval()
    narrow.load_state_dict(model.state_dict())  # but not `.to(dtype)`, which rounds the rotary frequencies too
    model.load_state_dict(narrow.state_dict())
    with torch.no_grad():
        logits, exact = narrow(ids[None]).logits[0].float(), model(ids[None]).logits[0]
    return Reference(config, model.state_dict(), ids, logits, exact)


@torch.no_grad()
def _teacher_forced(group, config, weights, ids, dtype):
    """Logits of all tokens in one step, and of each as a decode step of its own; both [N, V]."""
    model = parallel_model(config, weights, group, dtype)
    cache = KVCache(model.config, group, 1, len(ids), dtype=dtype)
    steps = [Step(ids[n : n + 1], (SequenceSlice(1, n),)) for n in range(len(ids))]
    one_by_one = [model.next_token_logits(step, cache).whole() for step in steps]
    return model(ids[None])[0].float(), torch.cat(one_by_one).float()


def distance(a, b):
    return (a - b).square().mean().sqrt()


@pytest.mark.parametrize("t", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*TINY_CONFIGS, "embedded"])
def test_teacher_forced_logits_are_as_near_as_rounding_allows(ranks, name, dtype, t):
    expected = reference(name, dtype)
    bound = FARTHEST * torch.finfo(dtype).eps * expected.logits.abs().max()
    best, second = expected.logits.topk(2).values.unbind(-1)
    certain = best - second > bound
    assert certain.float().mean() > 0.3
    for both in ranks(t).run(_teacher_forced, expected.config, expected.weights, expected.ids, dtype):
        for logits in both:
            assert distance(logits, expected.logits) <= 2**0.5 * distance(expected.logits, expected.exact)
            assert (logits - expected.logits).abs().max() <= bound
            assert torch.equal(logits.argmax(-1)[certain], expected.logits.argmax(-1)[certain])
