"""The residual stream: write order, taps, row selection, and errors by type."""

from __future__ import annotations

import pytest
import torch
from tiny_models import hub_config, parallel_model, transformers_model

from tp.errors import LayoutError
from tp.layers import Partial, Replicate, ResidualStream, Site, Step, Tap
from tp.layers.step import SequenceSlice
from tp.parallel import TensorParallelGroup

EMBED = Site(None, "embed")


def alone_stream(num_tokens, **options):
    group = TensorParallelGroup.alone()
    return group, ResidualStream(Replicate(group, num_tokens), **options)


def test_writes_resolve_in_order_with_their_bias_once_and_round_at_each_add():
    group, stream = alone_stream(1)
    bf16 = lambda value: torch.tensor([[value]], dtype=torch.bfloat16)  # noqa: E731
    stream.write(Partial(bf16(256.0), group), EMBED)
    stream.write(Partial(bf16(1.0), group), Site(0, "attn_out"))  # 257 is no bfloat16: rounds to 256
    stream.write(Partial(bf16(0.5), group, bias=torch.tensor([0.5], dtype=torch.bfloat16)), Site(0, "mlp_out"))
    assert stream.settle().item() == 256.0  # 256 + 1, each time; a sum rounded once would be 258


def test_a_tap_sees_the_complete_update_and_may_change_it():
    seen = []

    class TimesTen(Tap):
        def on_stream(self, site, value, layout):
            seen.append((site, value.clone()))
            return value * 10 if site.point == "attn_out" else value

    group, stream = alone_stream(2, tap=TimesTen())
    stream.write(Partial(torch.ones(2, 3), group), EMBED)
    stream.write(Partial(torch.ones(2, 3), group, bias=torch.full((3,), 2.0)), Site(0, "attn_out"))
    assert torch.equal(stream.settle(), torch.full((2, 3), 31.0))
    assert [site for site, _ in seen] == [EMBED, Site(0, "resid_pre"), Site(0, "attn_out"), Site(0, "resid_mid")]
    assert [value.unique().item() for _, value in seen] == [1, 1, 3, 31]


def test_taken_rows_equal_the_rows_of_the_settled_stream():
    rows = torch.tensor([4, 1, 1])
    for settle_first in (True, False):
        group, stream = alone_stream(5)
        stream.write(Partial(torch.arange(10.0).view(5, 2), group), EMBED)
        if settle_first:
            stream.settle()
        stream.write(
            Partial(torch.arange(10.0).view(5, 2) ** 2, group, bias=torch.tensor([0.5, 1])), Site(0, "mlp_out")
        )
        taken = stream.take(rows)
        assert taken.layout.num_tokens == 3
        assert torch.equal(taken.settle(), stream.settle()[rows])


def test_wrong_handles_are_errors_by_type():
    group, stream = alone_stream(2)
    with pytest.raises(LayoutError, match="takes a Partial, not a Tensor"):
        stream.write(torch.ones(2, 3), EMBED)
    with pytest.raises(LayoutError, match="3 rows written to 2 tokens"):
        stream.write(Partial(torch.ones(3, 3), group), EMBED)
    with pytest.raises(LayoutError, match="the write belongs to"):
        stream.write(Partial(torch.ones(2, 3), TensorParallelGroup.alone()), EMBED)
    with pytest.raises(LayoutError, match="before anything was written"):
        stream.settle()


def _zero_writes(group, config, weights):
    """A decoder whose sublayers write nothing leaves the embedding bitwise as it is."""
    weights = {k: torch.zeros_like(v) if "o_proj" in k or "down_proj" in k else v for k, v in weights.items()}
    model = parallel_model(config, weights, group)
    ids = torch.tensor([5, 96, 0, 5, 41])
    with torch.no_grad():
        state = model.residual_stream(Step(ids, (SequenceSlice(5),))).settle()
    return torch.equal(state, weights["model.embed_tokens.weight"][ids])


@pytest.mark.parametrize("t", [1, 2, 4])
def test_layers_that_write_zero_are_the_identity_on_the_stream(ranks, t):
    """Adding the residual on each rank before the reduction would count it t times."""
    weights = dict(transformers_model("qwen2").state_dict().items())
    assert ranks(t).run(_zero_writes, hub_config("qwen2"), weights) == [True] * t


def _captured(group, config, weights):
    captured = {}

    class Writes(Tap):
        def on_stream(self, site, value, layout):
            if not site.point.startswith("resid"):
                captured[site] = value.clone()
            return value

    model = parallel_model(config, weights, group)
    ids = torch.tensor([3, 1, 4, 1, 5])
    step = Step(ids, (SequenceSlice(5),))
    with torch.no_grad():
        untapped = model.residual_stream(step).settle()
        model.model.tap = Writes()
        final = model.residual_stream(step).settle()
    total = captured.pop(EMBED)
    for layer in range(model.config.num_layers):
        for point in ("attn_out", "mlp_out"):
            total = total + captured.pop(Site(layer, point))
    return torch.equal(total, final) and torch.equal(untapped, final) and not captured


@pytest.mark.parametrize("t", [1, 2, 3])
def test_the_final_state_is_the_embedding_plus_every_write(ranks, t):
    """x_L = x_0 + Σ (a_l + m_l), bitwise when added in the stream's order; capturing changes no number."""
    weights = transformers_model("llama").state_dict()
    assert all(ranks(t).run(_captured, hub_config("llama"), weights))
