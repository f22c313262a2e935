"""What hooks on unsharded models see, and do, at the points that `tp.inspection` names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from tiny_models import parallel_model
from torch import Tensor, nn

from tp.errors import TensorParallelError
from tp.layers import Replicate, ShardTokens
from tp.parallel import TensorParallelGroup

LAYOUTS = {"replicate": Replicate, "shard": ShardTokens}
TOLERANCE = 1e-5  # of the largest reference value, float32

Values = dict[tuple[str, int | None], Tensor]
"""By (point, layer)."""
Change = Callable[[Tensor], Tensor]
"""[T, D], or of z [T, H, head_dim], → the same."""


def refused(
    group: TensorParallelGroup,
    config: dict[str, Any],
    weights: dict[str, Tensor],
    failure: type[TensorParallelError],
    look: Callable[..., contextlib.AbstractContextManager[Any]],
    arguments: list[tuple[Sequence[Any], Mapping[str, Any]]],
) -> tuple[str, Any]:
    """What a forward within `look`, with arguments for each rank, is refused with, and the tap that is left."""
    model = parallel_model(config, weights, group)
    positional, by_name = arguments[group.rank]
    with pytest.raises(failure) as caught, look(model, *positional, **by_name):
        model(torch.tensor([[1, 2, 3]]))
    return str(caught.value), model.model.tap


def rows_of(vocab_size: int, lengths: tuple[int, ...], seed: int = 11) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in lengths]


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The rows in one batch, padded on the left, and its mask."""
    width = max(map(len, rows))
    ids = torch.stack([nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    return ids, torch.stack([torch.arange(width) >= width - len(row) for row in rows])


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape
    assert (actual.double() - expected.double()).abs().max() <= tolerance * expected.abs().max().double()


@contextlib.contextmanager
def hooked(model: Any) -> Iterator[Values]:
    """What passes the points of a transformers model in a forward of one sequence: [1, T, …], part of its graph."""
    values: Values = {}

    def keep(point: str, layer: int | None) -> Any:
        return lambda module, args, output: values.__setitem__((point, layer), first(output))

    def keep_input(point: str, layer: int) -> Any:
        return lambda module, args: values.__setitem__((point, layer), args[0])

    handles = [
        model.model.embed_tokens.register_forward_hook(keep("embed", None)),
        model.model.norm.register_forward_hook(keep("final_norm", None)),
    ]
    for index, layer in enumerate(model.model.layers):
        handles += [
            layer.register_forward_pre_hook(keep_input("resid_pre", index)),
            layer.self_attn.o_proj.register_forward_pre_hook(keep_input("z", index)),
            layer.self_attn.o_proj.register_forward_hook(keep("attn_out", index)),
            layer.post_attention_layernorm.register_forward_pre_hook(keep_input("resid_mid", index)),
            layer.mlp.register_forward_hook(keep("mlp_out", index)),
            layer.register_forward_hook(keep("resid_post", index)),
        ]
    try:
        yield values
    finally:
        for handle in handles:
            handle.remove()


def of_sequence(values: Values, heads: int) -> Values:
    """[1, T, …] → [T, …], z by heads."""
    by_head = {key: value[0].unflatten(-1, (heads, -1)) for key, value in values.items() if key[0] == "z"}
    return {key: value[0] for key, value in values.items()} | by_head


def captured_by_hooks(model: Any, ids: Tensor) -> Values:
    """Every point of one sequence through a transformers model, [T, D]; z [T, H, d]; pattern [H, T, T]; "logits"."""
    with hooked(model) as values:
        output = model(ids[None], output_hidden_states=True, output_attentions=True)
    values = of_sequence(values, model.config.num_attention_heads)
    for index, pattern in enumerate(output.attentions):
        values["pattern", index] = pattern[0]
        assert torch.equal(values["resid_pre", index], output.hidden_states[index][0])
    assert torch.equal(values["final_norm", None], output.hidden_states[-1][0])
    values["logits", None] = output.logits[0]
    return values


@contextlib.contextmanager
def changed_by_hooks(model: Any, *changes: tuple[str, int | None, Change]) -> Iterator[None]:
    """Hooks on a transformers model that make changes at points, for forwards of one sequence."""
    handles = [handle for point, layer, change in changes for handle in _hooks(model, point, layer, change)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _hooks(model: Any, point: str, layer: int | None, change: Change) -> list[Any]:
    def of_output(module: Any, args: Any, output: Any) -> Any:
        changed = change(first(output)[0])[None]
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    if layer is None:
        return [(model.model.embed_tokens if point == "embed" else model.model.norm).register_forward_hook(of_output)]
    block = model.model.layers[layer]
    if point == "z":

        def of_input(module: Any, args: Any) -> Any:
            z = args[0][0].unflatten(-1, (model.config.num_attention_heads, -1))
            return change(z).flatten(1)[None]

        return [block.self_attn.o_proj.register_forward_pre_hook(of_input)]
    if point == "resid_mid":  # inside the layer's own code: attn_out becomes what makes the sum the changed state
        states: list[Tensor] = []

        def of_attention(module: Any, args: Any, output: Any) -> Any:
            return (change((states[-1] + output)[0]) - states[-1][0])[None]

        return [
            block.register_forward_pre_hook(lambda module, args: states.append(args[0])),
            block.self_attn.o_proj.register_forward_hook(of_attention),
        ]
    if point == "resid_pre":
        return [block.register_forward_pre_hook(lambda module, args: (change(args[0][0])[None], *args[1:]))]
    module = {"attn_out": block.self_attn.o_proj, "mlp_out": block.mlp, "resid_post": block}[point]
    return [module.register_forward_hook(of_output)]
