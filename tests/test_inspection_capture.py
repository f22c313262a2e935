"""Captured values are those that hooks on the unsharded model see, at every degree and layout; capturing is unseen."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from inspection_references import LAYOUTS, assert_close, captured_by_hooks, padded, refused, rows_of
from norm_placement_models import placement_config, reference_model
from tiny_models import TINY_CONFIGS, hub_config, parallel_model, transformers_model

from tp.errors import CommunicationError, RequestError
from tp.generation import GenerationOptions, LanguageModel
from tp.inspection import POINTS, capture
from tp.layers import KVCache, Replicate, SequenceSlice, Step, Tap
from tp.models import CausalLM
from tp.native.library import library
from tp.parallel import TensorParallelGroup
from tp.parallel.shared_memory import SharedMemoryCommunicator

LENGTHS = (1, 5, 11)  # 17 tokens: divided by none of 2, 3
LAYERLESS = ("embed", "final_norm")


def everything(cache, num_layers):
    """All values of a cache by (point, layer); patterns as lists."""
    keys = [(point, None) for point in LAYERLESS]
    keys += [(point, layer) for point in POINTS if point not in LAYERLESS for layer in range(num_layers)]
    return {(point, layer): cache[point if layer is None else (point, layer)] for point, layer in keys}


def _captured(group, config, weights, layout, ids, mask):
    """Values of a padded batch: captured whole, and this rank's share of a second run."""
    model = parallel_model(config, weights, group)
    model.model.choose_layout = LAYOUTS[layout]
    with torch.no_grad(), capture(model, POINTS) as cache:
        logits = model(ids, mask)
    with torch.no_grad(), capture(model, POINTS, sharded=True, device="cpu") as share:
        model(ids, mask)
    layers = model.config.num_layers
    return logits, everything(cache, layers), cache.tokens, everything(share, layers), share.own_rows


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("t", [1, 2, 3])
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_values_of_a_padded_batch_are_those_of_hooks(ranks, family, t, layout):
    reference = transformers_model(family)
    rows = rows_of(reference.config.vocab_size, LENGTHS)
    with torch.no_grad():
        expected = [captured_by_hooks(reference, row) for row in rows]
    outcomes = ranks(t).run(_captured, hub_config(family), reference.state_dict(), layout, *padded(rows))
    for logits, values, tokens, *_ in outcomes:
        for index, row in enumerate(rows):
            assert_close(logits[index, -len(row) :], expected[index]["logits", None])
        for (point, layer), value in values.items():
            if point == "pattern":
                for pattern, of_row in zip(value, expected, strict=True):
                    assert_close(pattern, of_row[point, layer])
            else:
                assert_close(value, torch.cat([of_row[point, layer] for of_row in expected]))
        assert torch.equal(tokens.token_id, torch.cat(rows))
        assert tokens.position.tolist() == [position for row in rows for position in range(len(row))]
        assert tokens.sequence.tolist() == [index for index, row in enumerate(rows) for _ in row]
        assert tokens.forward.unique().tolist() == [0]
    assert_shares_are_the_whole(outcomes, layout)


def assert_shares_are_the_whole(outcomes, layout):
    """Shares of the ranks side by side, bitwise; replicated rows are on every rank."""
    values = outcomes[0][1]
    shares, own_rows = [of_rank[3] for of_rank in outcomes], [of_rank[4] for of_rank in outcomes]
    for (point, layer), value in values.items():
        of_ranks = [share[point, layer] for share in shares]
        if point == "pattern":
            assert all(torch.equal(torch.cat(parts), whole) for *parts, whole in zip(*of_ranks, value, strict=True))
        elif point == "z":
            assert torch.equal(torch.cat(of_ranks, dim=1), value)
        else:
            assert all(torch.equal(part, value[rows]) for part, rows in zip(of_ranks, own_rows, strict=True))
    if layout == "shard":
        assert torch.equal(torch.cat(own_rows), torch.arange(sum(LENGTHS)))


def _chosen(group, config, weights, ids, mask):
    """Whether some positions and heads are those of everything."""
    model = parallel_model(config, weights, group)
    found = []
    for layout in LAYOUTS.values():
        model.model.choose_layout = layout
        with (
            torch.no_grad(),
            capture(model, POINTS) as cache,
            capture(model, ["mlp_out", "z", "pattern"], [2], positions=[3, -1, 4], heads=[5, 1, 2]) as chosen,
        ):
            model(ids, mask)
        # lengths 1, 5, 11: the last of each; 3 and 4 of the second, whose last is 4; 3 and 4 of the third
        rows = torch.tensor([0, 4, 5, 9, 10, 16])
        of_sequences = [torch.tensor([0]), torch.tensor([3, 4]), torch.tensor([3, 4, 10])]
        heads = torch.tensor([1, 2, 5])
        found += [
            torch.equal(chosen["mlp_out", 2], cache["mlp_out", 2][rows]),
            torch.equal(chosen["z", 2], cache["z", 2][rows][:, heads]),
            all(
                torch.equal(few, all_of[heads][:, queries])
                for few, all_of, queries in zip(chosen["pattern", 2], cache["pattern", 2], of_sequences, strict=True)
            ),
            torch.equal(chosen.tokens.position, cache.tokens.position[rows]),
            ("mlp_out", 2) in chosen and ("mlp_out", 1) not in chosen and ("pattern", 0) not in chosen,
            chosen.heads == (1, 2, 5),
        ]
    return found


@pytest.mark.parametrize("t", [1, 2, 3])
def test_chosen_positions_and_heads(ranks, t):
    ids, mask = padded([torch.tensor([1, 2, 3][:1]), torch.arange(5), torch.arange(11)])
    weights = transformers_model("qwen2").state_dict()
    (expected,) = {tuple(of_rank) for of_rank in ranks(t).run(_chosen, hub_config("qwen2"), weights, ids, mask)}
    assert set(expected) == {True}


WRITES = {
    "pre": ("self_attn", "mlp"),
    "post": ("self_attn", "mlp"),
    "sandwich": ("post_attention_layernorm", "post_feedforward_layernorm"),
}
"""The modules of the plain reference decoder whose outputs are added."""


class ValuesOfPlacement:
    """What hooks on the plain reference decoder see, for each norm placement."""

    def __init__(self, config):
        self.config, self.model = config, reference_model(config)

    def of(self, ids):
        values, handles = {}, []
        placement = self.config["norm_placement"]

        def keep(module, key):
            handles.append(module.register_forward_hook(lambda m, args, output: values.__setitem__(key, output)))

        def keep_input(module, key):
            handles.append(module.register_forward_pre_hook(lambda m, args: values.__setitem__(key, args[0])))

        keep(self.model.model.embed_tokens, ("embed", None))
        for index, layer in enumerate(self.model.model.layers):
            attention, mlp = WRITES[placement]
            keep(getattr(layer, attention), ("attn_out", index))
            keep(getattr(layer, mlp), ("mlp_out", index))
            keep(layer, ("resid_post", index))
            keep_input(layer, ("resid_pre", index))
            keep_input(layer.self_attn.o_proj, ("z", index))
            middle = {"pre": "post_attention_layernorm", "post": "mlp", "sandwich": "pre_feedforward_layernorm"}
            keep_input(getattr(layer, middle[placement]), ("resid_mid", index))
        keep(self.model.model, ("final_norm", None))
        with torch.no_grad():
            self.model(ids)
        for handle in handles:
            handle.remove()
        for layer in range(self.config["num_hidden_layers"]):
            values["z", layer] = values["z", layer].unflatten(-1, (self.config["num_attention_heads"], -1))
        return values


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("placement", ["post", "sandwich"])
@pytest.mark.parametrize("norm, gated", [("layer_norm", False), ("rms_norm", True)])
def test_other_norm_placements(ranks, placement, norm, gated, layout):
    config = placement_config(placement, norm, gated)
    reference = ValuesOfPlacement(config)
    rows = rows_of(97, LENGTHS)
    expected = [reference.of(row) for row in rows]
    for _, values, *_ in ranks(2).run(_captured, config, reference.model.state_dict(), layout, *padded(rows)):
        for key in expected[0]:
            assert_close(values[key], torch.cat([of_row[key] for of_row in expected]))


def _generated(group, config, weights, prompts, chunk):
    """Values captured while two prompts are generated, and those of one forward over all tokens, by slot."""
    model = parallel_model(config, weights, group, model_class=LanguageModel)
    options = GenerationOptions(max_new_tokens=5, ignore_eos=True, prefill_chunk=chunk)
    with capture(model, ["resid_mid", "final_norm", "z", "pattern"], [0, 2]) as cache:
        result = model.generate(prompts, options)
    found = [captured_at(model, prompts, options, cache)]
    for slot, sequence in enumerate(result.sequences):
        ids = torch.tensor([*sequence.prompt_ids, *sequence.new_ids[:-1]])
        with torch.no_grad(), capture(model, ["resid_mid", "final_norm", "z", "pattern"], [0, 2]) as whole:
            model(ids[None])
        rows = cache.tokens.slot == slot
        assert torch.equal(cache.tokens.token_id[rows], ids)
        assert cache.tokens.position[rows].tolist() == list(range(len(ids)))
        found += [(cache[key][rows], whole[key]) for key in ("final_norm", ("resid_mid", 2), ("z", 0))]
        found += [(pattern_of(cache, slot, len(ids)), whole["pattern", 2][0])]
    return found, model.model.tap


def captured_at(model, prompts, options, whole):
    """Rows at two positions, of which most steps have neither, beside those of a capture of all positions."""
    model.model.choose_layout = LAYOUTS["shard"]
    points = ["resid_mid", "z", "pattern"]
    with capture(model, points, [2], positions=[1, 7]) as cache:
        model.generate(prompts, options)
    rows = (whole.tokens.position == 1) | (whole.tokens.position == 7)
    assert cache.tokens.position.tolist() == whole.tokens.position[rows].tolist()
    assert len(cache["pattern", 2]) == len(whole["pattern", 2])
    assert sum(pattern.shape[1] for pattern in cache["pattern", 2]) == rows.sum() == 3
    assert_close(cache["z", 2], whole["z", 2][rows])
    return cache["resid_mid", 2], whole["resid_mid", 2][rows]


def pattern_of(cache, slot, length):
    """[H, T, T] of one slot, put together from the steps' rows."""
    tokens = cache.tokens
    pieces = torch.stack([tokens.forward, tokens.sequence, tokens.slot], dim=1).unique_consecutive(dim=0)[:, 2]
    mine = [pattern for pattern, piece in zip(cache["pattern", 2], pieces, strict=True) if piece == slot]
    return torch.cat([torch.nn.functional.pad(rows, (0, length - rows.shape[-1])) for rows in mine], dim=1)


@pytest.mark.parametrize("family, t, chunk", [("qwen3", 1, 512), ("mistral", 2, 4), ("qwen2", 3, 512)])
def test_prefill_and_decode_through_generate_are_one_forward(ranks, family, t, chunk):
    weights = transformers_model(family).state_dict()
    for found, tap in ranks(t).run(_generated, hub_config(family), weights, [[3, 1, 4, 1, 5, 9], [2, 7]], chunk):
        for actual, expected in found:
            assert_close(actual, expected)
        assert tap is None


def _counted_fused_norms():
    fused = SharedMemoryCommunicator.reduce_add_rms_norm
    return mock.patch.object(SharedMemoryCommunicator, "reduce_add_rms_norm", autospec=True, side_effect=fused)


@torch.no_grad()
def _logits_with_and_without(group, config, weights, dtype):
    """Logits of a prefill and of decode steps without a capture, with one, and how often a fused norm ran."""
    model = parallel_model(config, weights, group, dtype)
    runs = []
    for layout in LAYOUTS.values():
        model.model.choose_layout = layout
        for points in ((), POINTS):
            cache = KVCache(model.config, group, 2, 16, dtype=dtype)
            with _counted_fused_norms() as fused, capture(model, points) if points else contextlib.nullcontext():
                prefill = Step(torch.arange(8), (SequenceSlice(5, slot=0), SequenceSlice(3, slot=1)))
                logits = [model.logits_of(model.residual_stream(prefill, cache)).whole()]
                logits.append(model.next_token_logits(prefill, cache).whole())
                for start in (5, 6):
                    pieces = (SequenceSlice(1, start, slot=0), SequenceSlice(1, start - 2, slot=1))
                    logits.append(model.next_token_logits(Step(torch.tensor([7, start]), pieces), cache).whole())
            runs.append((logits, fused.call_count))
    return runs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("t", [1, 2, 3])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_capturing_changes_no_number(ranks, family, t, dtype):
    weights = transformers_model(family).state_dict()
    for runs in ranks(t).run(_logits_with_and_without, hub_config(family), weights, dtype):
        for (without, _), (captured, fused) in zip(runs[::2], runs[1::2], strict=True):
            assert all(torch.equal(one, other) for one, other in zip(without, captured, strict=True))
            assert fused == 0
        assert t == 1 or runs[0][1] > 0 or library() is None


@torch.no_grad()
def _long_prompt_with_and_without(group, config, weights):
    """Logits after a prompt whose products have more rows than those of the tokens that give logits."""
    model = parallel_model(config, weights, group)
    found = []
    for points in ((), POINTS):
        cache = KVCache(model.config, group, 2, 48, dtype=torch.float32)
        prompts = Step(torch.arange(80) % 50, (SequenceSlice(47, slot=0), SequenceSlice(33, slot=1)))
        with capture(model, points) if points else contextlib.nullcontext():
            found.append(model.next_token_logits(prompts, cache).whole())
    return found


@pytest.mark.parametrize("t", [1, 3])
def test_after_a_long_prompt_logits_differ_by_rounding_alone(ranks, t):
    weights = transformers_model("llama").state_dict()
    for without, captured in ranks(t).run(_long_prompt_with_and_without, hub_config("llama"), weights):
        assert (captured - without).abs().max() <= 1e-5 * without.abs().max()


def _stream(group, config, weights, captures):
    """Ids of a stream whose third to fifth tokens are taken inside a capture, and what it saw."""
    model = parallel_model(config, weights, group, torch.bfloat16, LanguageModel)
    stream = model.generate_stream([[3, 1, 4, 1]], GenerationOptions(max_new_tokens=9, ignore_eos=True))
    ids = [next(stream).token_id for _ in range(3)]
    seen = None
    if captures:
        with capture(model, ["resid_post"], [1], device="cpu") as cache:
            ids += [next(stream).token_id for _ in range(3)]
        seen = cache.tokens.position.tolist(), cache["resid_post", 1].shape
    return ids + [event.token_id for event in stream], seen


@pytest.mark.parametrize("t", [1, 2])
def test_a_stream_that_was_opened_before_is_seen_inside(ranks, t):
    """Its decode steps may be replays of captured ones, before and after."""
    arguments = hub_config("qwen2"), transformers_model("qwen2").state_dict()
    ((expected, _), *_) = ranks(t).run(_stream, *arguments, False)
    for ids, seen in ranks(t).run(_stream, *arguments, True):
        assert ids == expected
        assert seen == ([6, 7, 8], (3, 42))


class TimesTwo(Tap):
    def on_stream(self, site, value, layout):
        return value * 2 if site.point == "embed" else value


def small_model(dtype=torch.float32):
    config = hub_config("llama")
    return parallel_model(config, transformers_model("llama").state_dict(), TensorParallelGroup.alone(), dtype)


def test_captures_see_each_other_in_order_and_leave_what_was_there():
    model, own, inner = small_model(), TimesTwo(), []
    model.model.tap = own
    ids = torch.tensor([[5, 2]])
    with capture(model, ["embed"]) as outer:
        with pytest.raises(ZeroDivisionError):
            _capture_and_fail(model, ids, inner)
        model(ids)
    assert model.model.tap is own
    table = model.model.embed_tokens.weight
    assert torch.equal(inner[0]["embed"], 2 * table[ids[0]])
    assert torch.equal(outer["embed"], 2 * table[ids[0].repeat(2)]) and outer.tokens.forward.tolist() == [0, 0, 1, 1]


def _capture_and_fail(model, ids, caches):
    with capture(model, ["embed"]) as cache:
        caches.append(cache)
        model(ids)
        raise ZeroDivisionError


def test_captures_may_end_in_any_order():
    model = small_model()
    first, second = capture(model, ["embed"]), capture(model, ["embed"])
    with contextlib.ExitStack() as stack:
        a = stack.enter_context(first)
        b = second.__enter__()
        stack.close()  # the first ends
        model(torch.tensor([[1]]))
        second.__exit__(None, None, None)
    assert model.model.tap is None
    assert not a.forwards and len(b.tokens) == 1


def test_bytes_are_counted():
    model = small_model(torch.bfloat16)
    with torch.no_grad(), capture(model, ["resid_pre", "z", "pattern"]) as cache:
        model(torch.arange(7)[None])
    width, heads, head_dim, layers = 45, 9, 16, 2
    assert cache.nbytes == layers * (7 * width * 2 + 7 * heads * head_dim * 2 + heads * 7 * 7 * 4)


def _refused(group, config, weights, arguments):
    model = parallel_model(config, weights, group)
    try:
        with capture(model, **arguments):
            raise AssertionError("it was not refused")
    except RequestError as error:
        return str(error), model.model.tap


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"points": ["resid_in"]}, "there is no point 'resid_in': choose from embed, resid_pre"),
        ({"points": ["resid_pre"], "layers": [2]}, "layer 2 is outside 0..1"),
        ({"points": ["embed"], "layers": [-1]}, "layer -1 is outside 0..1"),
        ({"points": ["z"], "heads": [9]}, "head 9 is outside 0..8"),
        ({"points": ["z"], "heads": [2, 2]}, "heads [2, 2] name one of them twice"),
        ({"points": "z"}, "points is 'z': give a list of points"),
        ({"points": ["z"], "layers": [0.5]}, "one of layers is 0.5: it must be a whole number"),
        ({"points": ["z"], "positions": -1}, "positions is -1: give a list of whole numbers"),
        ({"points": ["z"], "positions": [0.5]}, "one of positions is 0.5: it must be a whole number"),
        ({"points": ["z"], "positions": torch.tensor([True, False])}, "one of positions is tensor(True)"),
    ],
)
def test_what_cannot_be_captured_is_refused_on_every_rank(ranks, arguments, message):
    outcomes = ranks(2).run(_refused, hub_config("llama"), transformers_model("llama").state_dict(), arguments)
    assert all(message in said and tap is None for said, tap in outcomes)


@pytest.mark.parametrize(
    "one, other, message",
    [
        (
            {"points": ["z"]},
            {"points": ["z", "embed"]},
            "rank 0: z of layer 0, z of layer 1; rank 1: embed, z of",
        ),
        ({"layers": [0]}, {"layers": [1]}, "points of a capture, rank 0: z of layer 0; rank 1: z of layer 1"),
        ({"positions": [1]}, {}, "positions of a capture, rank 0: (1,); rank 1: None"),
        ({"heads": [1]}, {"heads": [1, 2]}, "heads of a capture, rank 0: (1,); rank 1: (1, 2)"),
        ({"sharded": True}, {}, "sharded of a capture, rank 0: True; rank 1: False"),
        ({"gradients": True}, {}, "gradients of a capture, rank 0: True; rank 1: False"),
    ],
)
def test_ranks_that_ask_for_different_things_are_told_so(ranks, one, other, message):
    arguments = [((), {"points": ["z"]} | of_rank) for of_rank in (one, other)]
    model = hub_config("llama"), transformers_model("llama").state_dict()
    outcomes = ranks(2).run(refused, *model, CommunicationError, capture, arguments)
    assert all(said.startswith("the ranks differ in ") and message in said and tap is None for said, tap in outcomes)


def _alone(group, config, weights):
    model = parallel_model(config, weights, group)
    model.model.choose_layout = Replicate
    with torch.no_grad(), capture(model, ["embed"]) if group.rank else contextlib.nullcontext():
        try:
            model(torch.tensor([[1, 2, 3]]))
        except CommunicationError as error:
            return str(error)


def test_a_rank_that_captures_alone_is_told_so(ranks):
    outcomes = ranks(2).run(_alone, hub_config("llama"), transformers_model("llama").state_dict(), timeout_s=20)
    assert all(said.startswith("the ranks are in different collectives, rank 0: ") for said in outcomes)


def test_numbers_may_be_tensors():
    model, ids = small_model(), torch.tensor([[1, 2, 3]])
    layers, positions, heads = torch.tensor([1]), torch.tensor([2, 0, 2]), torch.tensor([4, 0])
    with torch.no_grad(), capture(model, ["z"], layers, positions, heads) as cache, capture(model, ["z"]) as whole:
        model(ids)
    assert torch.equal(cache["z", layers[0]], whole["z", 1][[0, 2]][:, [0, 4]])


@pytest.mark.parametrize(
    "key, message",
    [
        (("attn_out", 0), "attn_out of layer 0 was captured in 0 of 1 forwards"),
        ("attn_out", "attn_out belongs to a layer: say which, 0 to 1"),
        (("embed", 0), "embed belongs to no layer, but layer 0 was given"),
        (("resid_pre", 2), "layer 2 is outside 0..1"),
        (("pattern", 0), "pattern of layer 0 was captured in 0 of 1 forwards"),
    ],
)
def test_values_that_a_cache_does_not_have(key, message):
    model = small_model()
    with capture(model, ["embed", "mlp_out"]) as cache:
        with pytest.raises(RequestError, match="embed was captured in 0 of 0 forwards"):
            cache["embed"]
        model(torch.tensor([[1, 2]]))
    with pytest.raises(RequestError) as error:
        cache[key]
    assert message in str(error.value)
    with pytest.raises(RequestError, match="mlp_out of layer 1 was reached by a gradient in 0 of 1 forwards"):
        cache.gradient("mlp_out", 1)


def test_the_state_before_a_layer_is_the_state_after_the_one_before():
    model: CausalLM = small_model()
    with torch.no_grad(), capture(model, ["resid_pre", "embed"]) as cache:
        model(torch.tensor([[1, 2]]))
    assert torch.equal(cache["resid_post", 0], cache["resid_pre", 1])
    assert torch.equal(cache["embed"], cache["resid_pre", 0])
