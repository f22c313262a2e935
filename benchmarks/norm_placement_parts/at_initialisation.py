"""Norms of the stream and of gradients before the first step, for each seed: what Xiong et al.'s lemmas are about."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.norm_placement_parts.analysed_model import analysed_model, random_batch
from tp.inspection import capture
from tp.layers.parameter import named_parts
from tp.models import CausalLM
from tp.parallel import TensorParallelGroup
from tp.training.train_step import LossModule

DEPTHS = (6, 8, 12, 16, 24)
STREAM_LAYERS = 24
PLACEMENTS = ("post", "pre")


def measure(group: TensorParallelGroup, num_seeds: int) -> dict[str, Any]:
    """Every list has a value (or a list of layers) for each seed; squared norms are in units of the hidden size.

    Returns:
        post_sums: of the sum that enters each post-norm layer's second norm, mean over tokens.
        pre_states: of the pre-norm stream after each layer: mean over tokens, of the first token, of the last.
        last_layers: by placement and depth, the last layer's `LayerFacts`.
        layers: by placement, those of all layers of the deepest model.
    """
    seeds = range(num_seeds)
    facts = {
        placement: {depth: [_layer_facts(placement, depth, seed, group) for seed in seeds] for depth in DEPTHS}
        for placement in PLACEMENTS
    }
    return {
        "post_sums": [_post_sums(seed, group) for seed in seeds],
        "pre_states": [_pre_states(seed, group) for seed in seeds],
        "last_layers": {
            placement: {str(depth): [of_seed.of_last() for of_seed in of_depth] for depth, of_depth in by_depth.items()}
            for placement, by_depth in facts.items()
        },
        "layers": {
            placement: [asdict(of_seed) for of_seed in facts[placement][DEPTHS[-1]]] for placement in PLACEMENTS
        },
    }


@dataclass(frozen=True)
class LayerFacts:
    """Of each layer, or of one, with the mean loss over the tokens.

    Attributes:
        gradient: Frobenius norm of the loss's gradient by the down projection, the paper's W².
        state: ‖x‖ / √d after the layer.
    """

    gradient: list[float]
    state: list[float]

    def of_last(self) -> dict[str, float]:
        return {"gradient": self.gradient[-1], "state": self.state[-1]}


@torch.no_grad()
def _post_sums(seed: int, group: TensorParallelGroup) -> list[float]:
    """The state after the first norm plus what the MLP writes: the second norm's input, layer by layer."""
    model = analysed_model("post", STREAM_LAYERS, seed, group)
    with capture(model, ["resid_mid", "mlp_out"]) as cache:
        model.residual_stream(random_batch(seed).step()).settle()
    return [
        squared_norms(cache["resid_mid", layer] + cache["mlp_out", layer]).mean().item()
        for layer in range(STREAM_LAYERS)
    ]


@torch.no_grad()
def _pre_states(seed: int, group: TensorParallelGroup) -> dict[str, list[float]]:
    model = analysed_model("pre", STREAM_LAYERS, seed, group)
    with capture(model, ["resid_post"]) as cache:
        model.residual_stream(random_batch(seed).step()).settle()
    norms = [squared_norms(cache["resid_post", layer]) for layer in range(STREAM_LAYERS)]
    return {
        "mean": [of_tokens.mean().item() for of_tokens in norms],
        "first": [of_tokens[0].item() for of_tokens in norms],
        "last": [of_tokens[-1].item() for of_tokens in norms],
    }


def _layer_facts(placement: str, depth: int, seed: int, group: TensorParallelGroup) -> LayerFacts:
    model = analysed_model(placement, depth, seed, group)
    batch = random_batch(seed)
    with capture(model, ["resid_post"]) as cache:
        LossModule(model)(batch, batch.num_labels).backward()
    states = [squared_norms(cache["resid_post", layer]).mean().sqrt().item() for layer in range(depth)]
    return LayerFacts(down_projection_gradients(model), states)


def squared_norms(states_ND: Tensor) -> Tensor:
    """[N]: ‖x‖² / d."""
    return states_ND.square().mean(-1)


def down_projection_gradients(model: CausalLM) -> list[float]:
    """Norm of the whole gradient of each layer's down projection, whose columns the ranks share out."""
    squares = torch.zeros(model.config.num_layers, dtype=torch.float64)
    for parameter in named_parts(model):
        if ".down_proj.weight" in parameter.path and parameter.tensor.grad is not None:
            squares[int(parameter.path.split(".")[2])] = parameter.tensor.grad.double().square().sum()
    norms: list[float] = model.group.communicator.all_reduce(squares).sqrt().tolist()
    return norms
