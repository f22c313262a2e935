"""Edits are those of hooks on the unsharded model, at every degree and layout, and gradients flow through them."""

from __future__ import annotations

import pytest
import torch
from inspection_references import LAYOUTS, assert_close, captured_by_hooks, changed_by_hooks, padded, refused, rows_of
from tiny_models import hub_config, parallel_model, transformers_model
from torch.nn import functional

from tp.errors import CommunicationError, RequestError
from tp.generation import GenerationOptions, LanguageModel
from tp.inspection import POINTS, add, capture, edit, patch, replace, scale, zero
from tp.layers import KVCache, SequenceSlice, Step
from tp.parallel import TensorParallelGroup
from tp.training import checkpoint_layers

LENGTHS = (2, 5, 9)  # 16 tokens: no multiple of 3
KINDS = {"replace": replace, "add": add, "scale": scale}
PLAINLY = {"replace": lambda x, value: value, "add": lambda x, value: x + value, "scale": lambda x, value: x * value}


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def made(case):
    """The edit of (kind, point, layer, value, positions, heads)."""
    kind, *arguments = case
    return KINDS[kind](*arguments)


def as_hook(case):
    """(point, layer, change): what the edit does to one sequence, token by token and head by head."""
    kind, point, layer, value, positions, heads = case

    def change(x):
        chosen = range(len(x)) if positions is None else positions
        rows = [position if position >= 0 else len(x) + position for position in chosen]
        entries = {row: entry for entry, row in reversed(list(enumerate(rows)))}  # the first of equal ones counts
        changed = x.clone()
        for row in entries.keys() & set(range(len(x))):
            own = value[entries[row]] if isinstance(value, torch.Tensor) and value.dim() == x.dim() else value
            if point != "z":
                changed[row] = PLAINLY[kind](x[row], own)
                continue
            for entry, head in enumerate(range(x.shape[1]) if heads is None else heads):
                of_head = own[entry] if isinstance(own, torch.Tensor) and own.dim() == 2 else own
                changed[row, head] = PLAINLY[kind](x[row, head], of_head)
        return changed

    return point, layer, change


def cases(config):
    """Lists of edits that are made together."""
    width, heads, head_dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    return [
        [("add", "embed", None, numbers(width), None, None)],
        [("replace", "resid_pre", 1, numbers(3, width), (0, 3, -1), None)],
        [("scale", "attn_out", 0, 0.3, None, None)],
        [("replace", "mlp_out", 1, 0.0, (1, 4), None)],
        [("add", "resid_mid", 1, numbers(2, width), (4, -1), None)],  # the last of the second sequence is named twice
        [("replace", "resid_post", 0, numbers(width), (0,), None)],
        [("scale", "final_norm", None, numbers(width), None, None)],
        [("replace", "z", 1, 0.0, None, (heads - 1, 2))],
        [("add", "z", 0, numbers(2, 3, head_dim), (3, -2), (4, 0, heads - 1))],
        [("scale", "z", 1, numbers(heads, head_dim), (-1,), None)],
        [
            ("add", "attn_out", 1, numbers(width, seed=1), None, None),
            ("scale", "attn_out", 1, -2.0, (-1, 0), None),
            ("replace", "z", 0, numbers(head_dim), None, (1,)),
            ("add", "resid_pre", 0, numbers(width, seed=2), (1,), None),
        ],
    ]


@torch.no_grad()
def _edited_logits(group, config, weights, layout, ids, mask, every_case):
    model = parallel_model(config, weights, group)
    model.model.choose_layout = LAYOUTS[layout]
    results = []
    for case in every_case:
        with edit(model, *map(made, case)):
            results.append(model(ids, mask))
    return results, model.model.tap


@pytest.fixture(scope="module")
def expected_logits():
    """For each case of two families the logits of each row under hooks."""
    results = {}
    for family in ("qwen3", "llama"):
        reference, config = transformers_model(family), hub_config(family)
        rows = rows_of(config["vocab_size"], LENGTHS)
        with torch.no_grad():
            plain = [reference(row[None]).logits[0] for row in rows]
            of_cases = []
            for case in cases(config):
                with changed_by_hooks(reference, *map(as_hook, case)):
                    of_cases.append([reference(row[None]).logits[0] for row in rows])
                assert (of_cases[-1][2] - plain[2]).abs().max() > 1e-3 * plain[2].abs().max()
        results[family] = reference.state_dict(), rows, of_cases
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("t", [1, 2, 3])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_edits_are_those_of_hooks(ranks, expected_logits, family, t, layout):
    weights, rows, expected = expected_logits[family]
    config = hub_config(family)
    outcomes = ranks(t).run(_edited_logits, config, weights, layout, *padded(rows), cases(config))
    for results, tap in outcomes:
        assert tap is None
        for logits, of_rows in zip(results, expected, strict=True):
            for index, row in enumerate(rows):
                assert_close(logits[index, -len(row) :], of_rows[index])


@torch.no_grad()
def _whole_rows(group, config, weights, value):
    """Logits under a value for each token of the batch, and of each sequence under its own tokens' values."""
    model = parallel_model(config, weights, group)
    rows = rows_of(config["vocab_size"], LENGTHS)
    step = Step(torch.cat(rows), tuple(SequenceSlice(len(row)) for row in rows))
    with edit(model, replace("mlp_out", 1, value)):
        together = model.logits_of(model.residual_stream(step)).whole()
    alone = []
    for row, own in zip(rows, value.split(LENGTHS), strict=True):
        with edit(model, replace("mlp_out", 1, own, positions=range(len(row)))):
            alone.append(model(row[None])[0])
    return together, torch.cat(alone)


@pytest.mark.parametrize("t", [1, 3])
def test_a_value_for_each_token_of_the_step(ranks, t):
    arguments = hub_config("mistral"), transformers_model("mistral").state_dict(), numbers(sum(LENGTHS), 40)
    for together, alone in ranks(t).run(_whole_rows, *arguments):
        assert_close(together, alone)


DIFFERENTIABLE = [
    ("add", "attn_out", 1, (30,), None, None),
    ("scale", "z", 0, (), None, (2, 7)),
    ("replace", "resid_mid", 1, (2, 30), (1, -1), None),
    ("add", "z", 2, (10, 14), (0, 3), None),
]
"""Of qwen3, with the shapes of values that want gradients."""


def differentiable():
    values = [numbers(*shape, seed=seed).requires_grad_() for seed, (_, _, _, shape, *_) in enumerate(DIFFERENTIABLE)]
    cases = zip(DIFFERENTIABLE, values, strict=True)
    return values, [(kind, point, layer, value, *rest) for (kind, point, layer, _, *rest), value in cases]


def batches(vocab_size):
    """Two batches of other lengths, with labels."""
    return [[(row, row.flip(0)) for row in rows_of(vocab_size, lengths)] for lengths in (LENGTHS, (4, 3))]


def _gradients(group, config, weights, layout, checkpointed):
    """Gradients of the values and of a norm, after the forwards of two batches and then both backwards."""
    model = parallel_model(config, weights, group)
    model.model.choose_layout = LAYOUTS[layout]
    if checkpointed:
        checkpoint_layers(model)
    values, each = differentiable()
    losses = []
    with edit(model, *map(made, each)):
        for batch in batches(config["vocab_size"]):
            step = Step(torch.cat([row for row, _ in batch]), tuple(SequenceSlice(len(row)) for row, _ in batch))
            logits = model.logits_of(model.residual_stream(step)).whole()
            labels = torch.cat([labels for _, labels in batch])
            losses.append(functional.cross_entropy(logits, labels, reduction="sum"))
    for loss in losses:
        loss.backward()
    return [value.grad for value in [*values, model.model.layers[0].input_layernorm.weight]]


@pytest.fixture(scope="module")
def expected_gradients():
    reference = transformers_model("qwen3")
    values, each = differentiable()
    with changed_by_hooks(reference, *map(as_hook, each)):
        for row, labels in (pair for batch in batches(101) for pair in batch):
            functional.cross_entropy(reference(row[None]).logits[0], labels, reduction="sum").backward()
    return [value.grad for value in [*values, reference.model.layers[0].input_layernorm.weight]]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("t", [1, 2, 3])
def test_values_of_edits_get_the_gradients_of_the_unsharded_model(ranks, expected_gradients, t, layout, checkpointed):
    arguments = hub_config("qwen3"), transformers_model("qwen3").state_dict(), layout, checkpointed
    for gradients in ranks(t).run(_gradients, *arguments):
        for gradient, expected in zip(gradients, expected_gradients, strict=True):
            assert_close(gradient, expected, 1e-5 if gradient.dim() else 1e-4)  # a number is a sum that cancels


SOURCE, TARGET = rows_of(97, (9, 6), seed=5)
PATCHES = [
    ("resid_post", 0, {"positions": [2, -1], "source_positions": [5, -1]}),
    ("attn_out", 1, {"positions": [4, 0]}),
    ("mlp_out", 2, {}),
    ("z", 1, {"positions": [-2], "source_positions": [3], "heads": [5, 2]}),
    ("z", 0, {"positions": [-1]}),
    ("embed", None, {"positions": [3]}),
]
"""The prompts differ in length: position -1 of one is 8, of the other 5."""


@torch.no_grad()
def _patched(group, config, weights, layout):
    model = parallel_model(config, weights, group)
    model.model.choose_layout = LAYOUTS[layout]
    with capture(model, POINTS) as cache:
        model(*padded([TARGET, SOURCE]))  # not alone in its batch
    logits = []
    for point, layer, where in PATCHES:
        with edit(model, patch(cache, point, layer, **where, sequence=1)):
            logits.append(model(TARGET[None])[0])
    return logits


def patched_by_hooks(reference, values, point, layer, positions=None, source_positions=None, heads=None):
    positions = range(len(TARGET)) if positions is None else positions
    sources = values[point, layer]

    def change(x):
        x = x.clone()
        for position, source in zip(positions, source_positions or positions, strict=True):
            at = position if heads is None else (position, heads)
            x[at] = sources[source] if heads is None else sources[source, heads]
        return x

    with changed_by_hooks(reference, (point, layer, change)):
        return reference(TARGET[None]).logits[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("t", [1, 2, 3])
def test_patching_between_prompts_of_different_length(ranks, t, layout):
    reference = transformers_model("qwen2")
    with torch.no_grad():
        values = captured_by_hooks(reference, SOURCE)
        expected = [patched_by_hooks(reference, values, point, layer, **where) for point, layer, where in PATCHES]
    for logits in ranks(t).run(_patched, hub_config("qwen2"), reference.state_dict(), layout):
        for actual, wanted in zip(logits, expected, strict=True):
            assert_close(actual, wanted)


STEERED = [("add", "resid_post", 1, 2 * numbers(40), None, None), ("replace", "mlp_out", 0, 0.0, (2, 9), None)]
"""Every token, and two positions: one of the prompt's second chunk, one that is generated."""


def _steered(group, config, weights):
    model = parallel_model(config, weights, group, model_class=LanguageModel)
    options = GenerationOptions(max_new_tokens=6, prefill_chunk=2)
    ids = []
    for each in ([], STEERED):
        with edit(model, *map(made, each)):
            ids.append(model.generate([[3, 1, 4, 1, 5], [9, 2]], options).sequences[0].new_ids)
    return ids


@pytest.mark.parametrize("t", [1, 2])
def test_generation_is_edited_in_every_step(ranks, t):
    reference, ids = transformers_model("mistral"), [3, 1, 4, 1, 5]
    with torch.no_grad(), changed_by_hooks(reference, *map(as_hook, STEERED)):
        for _ in range(6):
            ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
    for plain, steered in ranks(t).run(_steered, hub_config("mistral"), reference.state_dict()):
        assert list(steered) == ids[5:]
        assert plain != steered


def small_model():
    return parallel_model(hub_config("llama"), transformers_model("llama").state_dict(), TensorParallelGroup.alone())


@torch.no_grad()
def test_captures_and_edits_see_each_other_in_order():
    model, ids = small_model(), torch.tensor([[1, 2, 3]])
    with (
        capture(model, ["attn_out", "resid_mid"], [0]) as before,
        edit(model, zero("attn_out", 0)),
        capture(model, ["attn_out", "resid_pre"], [0]) as between,
        edit(model, add("attn_out", 0, 1.0), zero("z", 1)),
        capture(model, ["attn_out", "z"]) as after,
    ):
        model(ids)
    assert before["attn_out", 0].abs().min() > 0
    assert not between["attn_out", 0].any()
    assert (after["attn_out", 0] == 1).all() and not after["z", 1].any()
    assert torch.equal(before["resid_mid", 0], between["resid_pre", 0] + 1)  # the state has all edits of the write


def _edit_and_fail(model, ids, edited):
    with edit(model, zero("mlp_out", 0)):
        edited.append(model(ids))
        raise ZeroDivisionError


def test_edits_end_with_their_block_whatever_happens():
    model, ids, edited = small_model(), torch.tensor([[1, 2, 3]]), []
    plain = model(ids)
    with pytest.raises(ZeroDivisionError):
        _edit_and_fail(model, ids, edited)
    assert not torch.equal(edited[0], plain)
    assert model.model.tap is None and torch.equal(model(ids), plain)


def test_an_edit_of_positions_that_no_sequence_has_changes_nothing():
    model, ids = small_model(), torch.tensor([[1, 2, 3]])
    with edit(model, zero("mlp_out", 0, positions=[3, -4])):
        edited = model(ids)
    assert torch.equal(edited, model(ids))


def test_a_layer_may_be_a_tensor():
    model, ids = small_model(), torch.tensor([[1, 2, 3]])
    with edit(model, zero("mlp_out", 1)):
        expected = model(ids)
    with edit(model, zero("mlp_out", torch.tensor([0, 4]).argmax())):
        assert torch.equal(model(ids), expected)
    assert not torch.equal(model(ids), expected)


@pytest.mark.parametrize(
    "one, other, message",
    [
        ([zero("embed")], [], "number of edits, rank 0: 1; rank 1: 0"),
        (
            [zero("mlp_out", 0)],
            [zero("mlp_out", 1)],
            "edit 0, its point, rank 0: mlp_out of layer 0; rank 1: mlp",
        ),
        ([add("embed", None, 2)], [scale("embed", None, 2)], "edit 0, its change, rank 0: add; rank 1: mul"),
        (
            [zero("embed")] * 2,
            [zero("embed"), zero("embed", positions=[1])],
            "edit 1, its positions, rank 0: None; ",
        ),
        ([zero("z", 0, heads=[1])], [zero("z", 0, heads=[2])], "edit 0, its heads, rank 0: (1,); rank 1: (2,)"),
        (
            [add("embed", None, numbers(45))],
            [add("embed", None, numbers(45, seed=1))],
            "edit 0, its value, rank 0: [45] torch.float32 (digest ",
        ),
    ],
)
def test_ranks_that_edit_differently_are_told_so(ranks, one, other, message):
    model = hub_config("llama"), transformers_model("llama").state_dict()
    outcomes = ranks(2).run(refused, *model, CommunicationError, edit, [(one, {}), (other, {})])
    assert all(f"the ranks differ in {message}" in said and tap is None for said, tap in outcomes), outcomes


@pytest.mark.parametrize(
    "each, message",
    [
        (zero("resid_in", 0), "there is no point 'resid_in'"),
        (zero("pattern", 0), "attention patterns are captured only"),
        (zero("attn_out"), "attn_out belongs to a layer: say which, 0 to 1"),
        (zero("mlp_out", 2), "layer 2 is outside 0..1"),
        (zero("mlp_out", 0, heads=[1]), "mlp_out of layer 0 has no heads"),
        (zero("z", 0, heads=[9]), "head 9 is outside 0..8"),
        (zero("mlp_out", 0.5), "layer is 0.5: it must be a whole number"),
        (zero("mlp_out", True), "layer is True: it must be a whole number"),
        (
            add("mlp_out", 1, torch.ones(44)),
            "the value for mlp_out of layer 1 is [44]: it must be a number, [45] or [rows, 45]",
        ),
        (add("mlp_out", 1, torch.ones(2, 45), [1]), "is [2, 45]: it must be a number, [45] or [1, 45]"),
        (add("mlp_out", 1, torch.ones(1, 2, 45)), "is [1, 2, 45]: it must be"),
        (replace("z", 1, torch.ones(16, 9)), "is [16, 9]: it must be a number, [9, 16] or [rows, 9, 16]"),
        (replace("z", 1, torch.ones(9, 16), heads=[1, 2]), "it must be a number, [2, 16] or [rows, 2, 16]"),
        (replace("z", 1, torch.ones(2, 2, 16), [1], [1, 2]), "it must be a number, [2, 16] or [1, 2, 16]"),
        (replace("resid_mid", 1, torch.ones(4, 45)), "has 4 rows, the step 3 tokens: say which positions"),
    ],
)
def test_edits_that_cannot_be_made_are_refused_on_every_rank(ranks, each, message):
    model = hub_config("llama"), transformers_model("llama").state_dict()
    outcomes = ranks(2).run(refused, *model, RequestError, edit, [([each], {})] * 2)
    assert all(message in said and tap is None for said, tap in outcomes), outcomes


def test_patches_of_nothing_change_nothing():
    model, ids = small_model(), torch.tensor([[1, 2, 3]])
    with torch.no_grad(), capture(model, ["attn_out", "z"]) as cache:
        plain = model(ids)
    for nothing in (patch(cache, "attn_out", 0, positions=[]), patch(cache, "z", 0, heads=[])):
        with torch.no_grad(), edit(model, nothing):
            assert torch.equal(model(ids), plain)


@torch.no_grad()
def test_a_place_in_the_batch_that_two_sequences_had_is_no_source():
    """When the first one ends, the second moves up, at positions that the first did not reach."""
    model = small_model()
    cache = KVCache(model.config, model.group, num_slots=2, capacity=8, dtype=model.dtype)
    with capture(model, ["resid_mid"]) as source:
        model.next_token_logits(Step(torch.arange(5), (SequenceSlice(2), SequenceSlice(3, slot=1))), cache)
        model.next_token_logits(Step(torch.tensor([5]), (SequenceSlice(1, start=3, slot=1),)), cache)
    with pytest.raises(RequestError, match="sequence 0 of the source is not the same in all forwards"):
        patch(source, "resid_mid", 0)
    assert patch(source, "resid_mid", 0, sequence=1).positions == (0, 1, 2)


@torch.no_grad()
def test_patches_of_what_was_not_captured_are_refused():
    model, ids = small_model(), torch.tensor([[1, 2, 3, 4]])
    with capture(model, ["attn_out", "z"], [0], positions=[1, 2], heads=[3, 5]) as cache:
        model(ids)
    with capture(model, ["attn_out"], sharded=True) as share:
        model(ids)
    with capture(model, ["attn_out"]) as twice:
        model(ids)
        model(ids)
    for source, arguments, message in [
        (cache, {"positions": [0]}, "position 0 of the source was not captured: there are \\[1, 2\\]"),
        (cache, {"positions": [1], "source_positions": [1, 2]}, "2 source positions for 1 positions"),
        (cache, {"positions": [1], "sequence": 1}, "nothing was captured of sequence 1"),
        (cache, {"layer": 1}, "attn_out of layer 1 was captured in 0 of 1 forwards"),
        (cache, {"point": "z", "heads": [4]}, "head 4 of the source was not captured: there are \\[3, 5\\]"),
        (share, {}, "capture without sharded=True"),
        (twice, {}, "sequence 0 of the source was captured more than once"),
    ]:
        with pytest.raises(RequestError, match=message):
            patch(source, **({"point": "attn_out", "layer": 0} | arguments))
