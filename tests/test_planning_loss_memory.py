"""What the head and its loss hold at once, as planned and as torch's allocator counts it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from allocation import most_allocated
from test_planning_plan import SEVEN_B

from tp.models import CausalLM, initialise_parameters
from tp.planning.memory import loss_activations
from tp.planning.parameters import distinct_ranks
from tp.planning.precision import Precision
from tp.training.cross_entropy import chunked_head_cross_entropy

TINY = replace(
    SEVEN_B, num_layers=1, num_attention_heads=1, num_kv_heads=1, head_dim=2, intermediate_size=2, sliding_windows=()
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens, vocab_size, width", [(2048, 1500, 64), (1000, 1500, 64), (700, 300, 2000)])
def test_the_loss_holds_as_much_as_is_planned(tokens, vocab_size, width, dtype):
    """Several chunks of wide logits, one chunk, and a head larger than its logits."""
    config = replace(TINY, vocab_size=vocab_size, hidden_size=width)
    model = CausalLM(config, dtype=torch.float32)
    initialise_parameters(model, seed=0)
    states = torch.randn(tokens, width).to(getattr(torch, dtype)).requires_grad_()
    labels = torch.arange(tokens) % vocab_size
    (planned,) = distinct_ranks(config, Precision.of(dtype), 1)
    most = most_allocated(lambda: chunked_head_cross_entropy(model.lm_head, states, labels))
    assert most + tokens * planned.row_bytes == pytest.approx(loss_activations(planned, "cpu", tokens), rel=0.01)
    assert loss_activations(planned, "cuda", tokens) <= loss_activations(planned, "cpu", tokens)
