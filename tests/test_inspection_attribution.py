"""Contributions sum to logits, the lens is the plain computation on whole logits, and the residual identity holds."""

from __future__ import annotations

import pytest
import torch
from inspection_references import LAYOUTS, assert_close, captured_by_hooks, rows_of
from norm_placement_models import placement_config, reference_model
from tiny_models import TINY_CONFIGS, hub_config, parallel_model, transformers_model

from tp.errors import RequestError
from tp.inspection import add, capture, direct_contributions, edit, logit_lens, residual_identity_error
from tp.inspection.lens import ROWS
from tp.models import prepare_for_inference
from tp.parallel import TensorParallelGroup

WRITES = ("embed", "attn_out", "mlp_out", "resid_post", "z")
TARGETS, AGAINST = [4, 0, 81], 7


@torch.no_grad()
def _contributions(group, config, weights, layout, ids, dtype=torch.float32, int8=False):
    """Of several ids, of one against another, and of an earlier row; with the model's own logits."""
    model = parallel_model(config, weights, group, dtype)
    model.model.choose_layout = LAYOUTS[layout]
    if int8:
        prepare_for_inference(model, "int8")
    with capture(model, WRITES) as cache:
        logits = model(ids[None])[0]
    several = direct_contributions(model, cache, TARGETS)
    difference = direct_contributions(model, cache, TARGETS[0], AGAINST, row=2)
    return several, difference, logits


def frozen(norm, x, part, eps):
    """The part of norm(x) that `part` of x makes, written plainly; `norm` is (weight, bias)."""
    weight, bias = norm
    if bias is None:
        return weight * part / (x.square().mean() + eps).sqrt()
    centred = part - part.mean()
    return weight * centred / (x.var(correction=0) + eps).sqrt()


def plain_contributions(values, weights, config, target, row):
    """(embedding, attention [L], mlp [L], heads [L, H]) of W_U[target], from whole float64 weights."""
    weights = {name: tensor.double() for name, tensor in weights.items()}
    values = {key: value.double() for key, value in values.items()}
    layers, heads = range(config["num_hidden_layers"]), range(config["num_attention_heads"])
    unembedding = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])[target]
    eps = config.get("rms_norm_eps", 1e-6)
    norm = weights["model.norm.weight"], weights.get("model.norm.bias")
    final = values["resid_post", layers[-1]][row]

    def logit_of(part):
        return unembedding @ frozen(norm, final, part, eps)

    of_heads = torch.zeros(len(layers), len(heads), dtype=torch.float64)
    for layer in layers:
        path = f"model.layers.{layer}."
        matrices = weights[path + "self_attn.o_proj.weight"].split(config["head_dim"], dim=1)
        writes = [matrix @ z for matrix, z in zip(matrices, values["z", layer][row], strict=True)]
        for head, write in enumerate(writes):
            if config.get("norm_placement") == "sandwich":
                norm_path = path + "post_attention_layernorm."
                of_write = weights[norm_path + "weight"], weights.get(norm_path + "bias")
                whole = sum(writes) + weights[path + "self_attn.o_proj.bias"]
                write = frozen(of_write, whole, write, eps)
            of_heads[layer, head] = logit_of(write)
    attention, mlp = (
        torch.stack([logit_of(values[point, layer][row]) for layer in layers]) for point in ("attn_out", "mlp_out")
    )
    return logit_of(values["embed", None][row]), attention, mlp, of_heads


def assert_contributions(actual, expected, logit, final_bias=0.0):
    """Those of the plain formula; they sum to the model's logit within 1e-4 of the largest, heads to their sublayer."""
    embedding, attention, mlp, heads = expected
    largest = max(attention.abs().max(), mlp.abs().max(), embedding.abs())
    tolerance = 1e-4 * largest
    for one, other in zip((actual.embedding, actual.attention, actual.mlp, actual.heads), expected, strict=True):
        assert one.shape == other.shape and (one - other).abs().max() <= tolerance
    total = actual.embedding + actual.attention.sum(0) + actual.mlp.sum(0) + actual.final_bias
    assert (total - logit).abs() <= tolerance
    assert (total + actual.rounding - actual.logit).abs() <= 1e-9 * largest
    assert (actual.heads.sum(1) + actual.attention_bias - actual.attention).abs().max() <= tolerance
    assert (actual.final_bias - final_bias).abs() <= tolerance
    assert heads.abs().max() > 100 * tolerance


def pick(contributions, index):
    """Those of one of several ids."""
    return type(contributions)(**{name: value[..., index] for name, value in vars(contributions).items()})


def minus(one, other):
    return [a - b for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize("t, layout", [(1, "replicate"), (2, "replicate"), (2, "shard"), (3, "shard")])
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_contributions_are_the_plain_formula_and_sum_to_the_logit(ranks, family, t, layout):
    reference, config = transformers_model(family), hub_config(family)
    weights = reference.state_dict()
    (ids,) = rows_of(config["vocab_size"], (7,))
    with torch.no_grad():
        values = captured_by_hooks(reference, ids)
    expected = [plain_contributions(values, weights, config, target, -1) for target in TARGETS]
    of_pair = minus(*(plain_contributions(values, weights, config, target, 2) for target in (TARGETS[0], AGAINST)))
    for several, difference, logits in ranks(t).run(_contributions, config, weights, layout, ids):
        for index, target in enumerate(TARGETS):
            assert_contributions(pick(several, index), expected[index], logits[-1, target])
        assert_contributions(difference, of_pair, logits[2, TARGETS[0]] - logits[2, AGAINST])


@pytest.mark.parametrize(
    "placement, norm", [("pre", "layer_norm"), ("sandwich", "layer_norm"), ("sandwich", "rms_norm")]
)
def test_layer_norms_and_norms_of_writes(ranks, placement, norm):
    config = placement_config(placement, norm, gated=False)
    weights = reference_model(config).state_dict()
    (ids,) = rows_of(97, (7,))
    for contributions, values, logits in ranks(2).run(_captured_and_explained, config, weights, ids):
        bias = weights.get("model.norm.bias", torch.zeros(42))
        for index, target in enumerate(TARGETS):
            expected = plain_contributions(values, weights, config, target, -1)
            final_bias = weights["lm_head.weight"][target] @ bias
            assert_contributions(pick(contributions, index), expected, logits[-1, target], final_bias)


@torch.no_grad()
def _captured_and_explained(group, config, weights, ids):
    model = parallel_model(config, weights, group)
    with capture(model, WRITES) as cache:
        logits = model(ids[None])[0]
    keys = [("embed", None), *((point, layer) for point in WRITES[1:] for layer in range(model.config.num_layers))]
    return direct_contributions(model, cache, TARGETS), {key: cache.value(*key) for key in keys}, logits


@pytest.mark.parametrize("int8", [False, True])
def test_what_rounding_leaves_is_told_in_bfloat16_and_int8(ranks, int8):
    weights = transformers_model("qwen2").state_dict()
    (ids,) = rows_of(97, (7,))
    for several, _, logits in ranks(2).run(
        _contributions, hub_config("qwen2"), weights, "replicate", ids, torch.bfloat16, int8
    ):
        parts = several.embedding + several.attention.sum(0) + several.mlp.sum(0)
        assert (parts + several.rounding - several.logit).abs().max() < 1e-9
        assert several.rounding.abs().min() > 0
        assert (several.logit - logits[-1, TARGETS]).abs().max() <= 0.02 * logits.abs().max()


def model_and_cache(points=WRITES, config=None, **options):
    group = TensorParallelGroup.alone()
    if config is None:
        model = parallel_model(hub_config("llama"), transformers_model("llama").state_dict(), group)
    else:
        model = parallel_model(config, reference_model(config).state_dict(), group)
    with torch.no_grad(), capture(model, points, **options) as cache:
        model(torch.tensor([[1, 2, 3]]))
    return model, cache


def test_contributions_without_heads():
    model, cache = model_and_cache(WRITES[:-1])
    contributions = direct_contributions(model, cache, 5)
    assert contributions.heads is None and contributions.attention_bias is None
    model, cache = model_and_cache(heads=[1, 2])
    assert direct_contributions(model, cache, 5).heads is None


@pytest.mark.parametrize(
    "options, arguments, message",
    [
        ({}, {"target_ids": 103}, "token id 103 is outside 0..102"),
        ({}, {"target_ids": 1, "against": -1}, "token id -1 is outside 0..102"),
        ({}, {"target_ids": 1, "row": 3}, "row 3 is outside the 3 captured rows"),
        ({}, {"target_ids": 1.0}, "target_ids is 1.0: give one token id or several, whole numbers"),
        ({}, {"target_ids": []}, "target_ids is []: give one token id or several, whole numbers"),
        ({}, {"target_ids": 1, "against": 2**70}, "token ids are whole numbers"),
        ({}, {"target_ids": [1, 2, 3], "against": [1, 2]}, "against is [2] for targets [3]: give as many, or one"),
        ({"sharded": True}, {"target_ids": 1}, "capture without sharded=True"),
        ({"points": ["embed"]}, {"target_ids": 1}, "resid_post of layer 1 was captured in 0 of 1 forwards"),
        ({"config": placement_config("post", "rms_norm", True)}, {"target_ids": 1}, "this model is post-norm"),
    ],
)
def test_attributions_that_cannot_be_made(options, arguments, message):
    model, cache = model_and_cache(**options)
    with pytest.raises(RequestError) as error:
        direct_contributions(model, cache, **arguments)
    assert message in str(error.value)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_ids_of_every_integer_type(dtype):
    model, cache = model_and_cache()
    expected = direct_contributions(model, cache, [3, 5], against=[4]).logit
    ids = torch.tensor([3, 5], dtype=dtype)
    assert expected.shape == (2,) and expected.abs().min() > 0
    assert torch.equal(direct_contributions(model, cache, ids, torch.tensor(4, dtype=dtype)).logit, expected)


@torch.no_grad()
def _lens(group, config, weights, ids, dtype):
    model = parallel_model(config, weights, group, dtype)
    with capture(model, ["resid_post"]) as cache:
        logits = model(ids[None])[0]
    states = torch.stack([cache["resid_post", layer] for layer in range(model.config.num_layers)])
    normed = states if model.model.norm is None else model.model.norm(states)
    whole = model.lm_head(normed).whole()
    return logit_lens(model, states, top=4), logit_lens(model, states[:, -1], top=200), whole, logits


def assert_is_the_lens_of(lens, logits):
    """Of whole logits [L, ..., V], in float64."""
    log_p = logits.double().log_softmax(-1)
    log_q = log_p[-1:].expand_as(log_p)
    order = logits.float().sort(dim=-1, descending=True, stable=True)
    count = lens.token_ids.shape[-1]
    assert torch.equal(lens.token_ids, order.indices[..., :count])
    for actual, expected in [
        (lens.probabilities, log_p.exp().gather(-1, lens.token_ids)),
        (lens.entropy, -(log_p.exp() * log_p).sum(-1)),
        (lens.kl_from_final, (log_q.exp() * (log_q - log_p)).sum(-1)),
        (lens.kl_to_final, (log_p.exp() * (log_p - log_q)).sum(-1)),
    ]:
        assert actual.shape == expected.shape and (actual - expected).abs().max() < 1e-5
    assert lens.kl_from_final[:-1].min() > 1e-3 and lens.kl_from_final.min() >= 0


LENSES = [("qwen3", 1, 101, torch.float32), ("llama", 2, 103, torch.float32), ("qwen2", 3, 4, torch.float32)]
LENSES += [("mistral", 3, 89, torch.bfloat16), ("qwen2", 3, 4, torch.bfloat16)]


@pytest.mark.parametrize("family, t, vocab_size, dtype", LENSES)
def test_the_lens_is_the_plain_computation_on_whole_logits(ranks, family, t, vocab_size, dtype):
    """Of a vocabulary of 4, the third rank owns nothing; of many tokens, not all have logits at once."""
    weights = transformers_model(family, vocab_size=vocab_size).state_dict()
    (ids,) = rows_of(vocab_size, (ROWS + 3 if dtype == torch.float32 else 5,))
    config = hub_config(family, vocab_size=vocab_size)
    for lens, of_last, whole, logits in ranks(t).run(_lens, config, weights, ids, dtype):
        assert_is_the_lens_of(lens, whole)
        assert_is_the_lens_of(of_last, whole[:, -1])
        assert of_last.token_ids.shape[-1] == vocab_size
        if dtype == torch.float32:  # of another number of rows the products round otherwise
            assert torch.equal(lens.token_ids[-1, :, 0], logits.argmax(-1))


def test_the_lens_of_a_post_norm_model_has_no_further_norm(ranks):
    config = placement_config("post", "layer_norm", True)
    (ids,) = rows_of(97, (5,))
    for lens, _, whole, logits in ranks(2).run(_lens, config, reference_model(config).state_dict(), ids, torch.float32):
        assert_is_the_lens_of(lens, whole)
        assert_close(whole[-1], logits)


def test_equally_likely_tokens_come_in_the_order_of_their_ids(ranks):
    weights = {
        name: tensor.zero_() if "lm_head" in name else tensor
        for name, tensor in transformers_model("qwen2").state_dict().items()
    }
    for lens, *_ in ranks(3).run(_lens, hub_config("qwen2"), weights, torch.tensor([1, 2]), torch.float32):
        assert lens.token_ids.unique(dim=1).tolist() == [[[0, 1, 2, 3]]] * 3


@torch.no_grad()
def _lens_of_logits(group, config, weights, logits):
    """Ids of a state whose logits these are, and of one that is not finite."""
    model = parallel_model(config, weights, group)
    model.model.norm = None
    head = model.lm_head
    head.weight.zero_()[: len(head.vocab_range), 0] = logits[head.vocab_range.start : head.vocab_range.stop]
    state = torch.eye(1, model.config.hidden_size)[None]
    count = len(logits)
    return logit_lens(model, state, top=4).token_ids, logit_lens(model, state * torch.inf, top=count).token_ids


@pytest.mark.parametrize("t", [1, 2, 3])
def test_tokens_that_are_nearly_equally_likely_come_in_the_order_of_their_logits(ranks, t):
    """Beside the largest logit, 100, the differences of the next ones are lost in float32."""
    logits = torch.full((97,), -5.0)
    logits[[0, 10, 95, 94]] = torch.tensor([100, 1, 1 + 3e-7, 1 + 6e-7])
    arguments = hub_config("qwen2"), transformers_model("qwen2").state_dict(), logits
    for token_ids, of_infinity in ranks(t).run(_lens_of_logits, *arguments):
        assert token_ids.flatten().tolist() == [0, 94, 95, 10]
        assert sorted(of_infinity.flatten().tolist()) == list(range(97))  # never padding


def test_states_are_cast_to_the_dtype_of_the_model():
    model, cache = model_and_cache(["resid_post"])
    states = torch.stack([cache["resid_post", 0], cache["resid_post", 1]])
    assert torch.equal(logit_lens(model, states.double()).entropy, logit_lens(model, states).entropy)


@pytest.mark.parametrize(
    "shape, top, message",
    [
        ((2, 44), 5, "states are (2, 44)"),
        ((45,), 5, "takes [L, ..., 45]"),
        ((0, 45), 5, "(0, 45)"),
        ((1, 45), 0, "top is 0"),
    ],
)
def test_lenses_that_cannot_be_made(shape, top, message):
    model, _ = model_and_cache()
    with pytest.raises(RequestError) as error:
        logit_lens(model, torch.zeros(shape), top)
    assert message in str(error.value)


@torch.no_grad()
def _identity(group, config, weights, layout, dtype):
    """Of a run, and of one whose states were changed between the writes by 64 roundings of their largest entry."""
    model = parallel_model(config, weights, group, dtype)
    model.model.choose_layout = LAYOUTS[layout]
    points = ["embed", "attn_out", "mlp_out", "resid_post"]
    ids = rows_of(config["vocab_size"], (13,))[0][None]
    with capture(model, points) as cache:
        model(ids)
    size = 64 * torch.finfo(dtype).eps * cache["resid_post", 0].abs().max().item()
    with edit(model, add("resid_mid", 1, size)), capture(model, points) as broken:
        model(ids)
    return residual_identity_error(cache), residual_identity_error(broken), cache["resid_post", 1].abs().max().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "t, layout, placement", [(1, "replicate", "pre"), (2, "shard", "pre"), (3, "replicate", "sandwich")]
)
def test_the_residual_identity_holds_within_rounding_and_a_broken_one_is_seen(ranks, t, layout, placement, dtype):
    config = placement_config(placement, "rms_norm", True)
    weights = reference_model(config).state_dict()
    for held, broken, largest in ranks(t).run(_identity, config, weights, layout, dtype):
        assert held.holds and held.ratio <= 1 and not broken.holds
        assert broken.ratio > 4
        eps = torch.finfo(dtype).eps
        assert 0 < held.allowed <= 4 * 2 * eps * largest  # 4 adds
        assert held.error > 0 or dtype == torch.float64
        assert held.error <= held.allowed


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_the_residual_identity_of_what_is_not_finite_does_not_hold(value):
    model, _ = model_and_cache()
    with torch.no_grad(), edit(model, add("attn_out", 0, value, positions=[1])), capture(model, WRITES) as cache:
        model(torch.tensor([[1, 2, 3]]))
    assert not residual_identity_error(cache).holds


def test_the_residual_identity_is_not_that_of_post_norm():
    _, cache = model_and_cache(config=placement_config("post", "rms_norm", True))
    with pytest.raises(RequestError, match="the residual identity needs states that are sums of writes"):
        residual_identity_error(cache)
