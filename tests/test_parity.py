"""The parallel model against transformers: same weights, same logits, for every family, degree and rope type."""

from __future__ import annotations

import pytest
import torch
from tiny_models import ROPE_PARAMETERS, TINY_CONFIGS, hub_config, parallel_model, transformers_model

from tp.errors import RequestError
from tp.parallel import TensorParallelGroup

LENGTHS = [1, 5, 17]
TOLERANCE = 1e-5  # of the largest reference logit, float32


def prompts(vocab_size, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in lengths]


def padded(rows, side):
    width = max(len(row) for row in rows)
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        where = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[index, where], mask[index, where] = row, 1
    return ids, mask


def _logits(group, config, weights, batches):
    model = parallel_model(config, weights, group)
    with torch.no_grad():
        return [model(ids.to(group.device), mask.to(group.device)).cpu() for ids, mask in batches]


def reference_logits(model, rows):
    with torch.no_grad():
        return [model(row[None]).logits[0] for row in rows]


def assert_parity(actual, expected):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_every_parameter_of_the_tiny_models_is_felt(family):
    """Parity proves nothing about a parameter that does not move the logits."""
    model = transformers_model(family)
    row = prompts(model.config.vocab_size)[-1]
    (expected,) = reference_logits(model, [row])
    for parameter in model.parameters():
        kept = parameter.detach().clone()
        parameter.data.zero_()
        (changed,) = reference_logits(model, [row])
        assert (changed - expected).abs().max() > 100 * TOLERANCE * expected.abs().max()
        parameter.data.copy_(kept)


@pytest.mark.parametrize("t", [1, 2, 3, 4])
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_logits_of_batches_padded_on_either_side_and_of_prompts_alone(ranks, family, t):
    reference = transformers_model(family)
    rows = prompts(reference.config.vocab_size)
    expected = reference_logits(reference, rows)
    batches = [padded(rows, "left"), padded(rows, "right"), *(padded([row], "right") for row in rows)]
    for together_left, together_right, *alone in ranks(t).run(
        _logits, hub_config(family), reference.state_dict(), batches
    ):
        for index, row in enumerate(rows):
            assert_parity(together_left[index, -len(row) :], expected[index])
            assert_parity(together_right[index, : len(row)], expected[index])
            assert_parity(alone[index][0], expected[index])


@pytest.mark.parametrize("rope_type", ROPE_PARAMETERS)
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_rope_types_past_the_original_length(ranks, family, rope_type):
    overrides = {"rope_parameters": ROPE_PARAMETERS[rope_type], "max_position_embeddings": 24}
    reference = transformers_model(family, **overrides)
    (row,) = prompts(reference.config.vocab_size, [41])
    (expected,) = reference_logits(reference, [row])
    batch = padded([row], "right")
    for (actual,) in ranks(3).run(_logits, hub_config(family, **overrides), reference.state_dict(), [batch]):
        assert_parity(actual[0], expected)


# (query heads, KV heads, degree): KV heads on several ranks, query heads that do not divide, one head a rank
HEAD_CASES = [(4, 1, 4), (4, 2, 4), (12, 3, 4), (6, 3, 4), (10, 2, 3), (9, 3, 2), (9, 3, 4), (14, 2, 5), (14, 2, 7)]


@pytest.mark.parametrize("heads, kv_heads, t", HEAD_CASES)
def test_heads_that_do_not_divide_and_kv_heads_on_several_ranks(ranks, heads, kv_heads, t):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * 3, "head_dim": 8}
    reference = transformers_model("qwen2", **sizes)
    rows = prompts(reference.config.vocab_size)
    expected = reference_logits(reference, rows)
    for (actual,) in ranks(t).run(
        _logits, hub_config("qwen2", **sizes), reference.state_dict(), [padded(rows, "left")]
    ):
        for index, row in enumerate(rows):
            assert_parity(actual[index, -len(row) :], expected[index])


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu"])
def test_other_activations(activation):
    reference = transformers_model("llama", hidden_act=activation)
    rows = prompts(reference.config.vocab_size)
    (actual,) = _logits(
        TensorParallelGroup.alone(),
        hub_config("llama", hidden_act=activation),
        reference.state_dict(),
        [padded(rows[-1:], "left")],
    )
    assert_parity(actual[0], reference_logits(reference, rows[-1:])[0])


def _sharded(group, config, weights, ids):
    model = parallel_model(config, weights, group)
    with torch.no_grad():
        sharded = model.sharded_logits(ids)
        return sharded.local.shape, sharded.num_valid, torch.equal(sharded.whole(), model(ids)), sharded.whole()


def test_sharded_logits_are_the_whole_ones_split(ranks):
    config = hub_config("qwen2")
    weights = transformers_model("qwen2").state_dict()
    ids = torch.tensor([[1, 96, 3]])
    for rank, (shape, valid, equal, whole) in enumerate(ranks(4).run(_sharded, config, weights, ids)):
        assert shape == (1, 3, 25)
        assert valid == (22 if rank == 3 else 25)
        assert equal
        assert whole.shape == (1, 3, 97)


def _refused(group, config, weights, ids, mask):
    model = parallel_model(config, weights, group)
    try:
        model(ids, mask)
    except RequestError as error:
        return str(error)


@pytest.mark.parametrize(
    "ids, mask, message",
    [
        ([[1, 97, 2]], None, "input_ids run from 1 to 97: outside 0..96"),
        ([[1, -1, 2]], None, "input_ids run from -1 to 2: outside 0..96"),
        ([[1, 1, 2]], [[1, 0, 1]], "attention_mask row 0 has 2 tokens in 2 runs: it needs one run"),
        ([[1, 1, 2], [1, 2, 3]], [[1, 1, 1], [0, 0, 0]], "attention_mask row 1 has 0 tokens in 0 runs"),
        ([[1, 2]], [[1]], r"attention_mask is (1, 1), input_ids is (1, 2): they must agree"),
        ([1, 2], None, r"input_ids is (2,): it must be [batch, length], neither empty"),
    ],
)
def test_bad_input_is_refused_on_every_rank(ranks, ids, mask, message):
    weights = transformers_model("qwen2").state_dict()
    mask = None if mask is None else torch.tensor(mask)
    outcomes = ranks(2).run(_refused, hub_config("qwen2"), weights, torch.tensor(ids), mask)
    assert all(message in outcome for outcome in outcomes)
