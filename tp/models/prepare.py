"""One explicit step that trades a model's weights for smaller ones that only inference can use."""

from __future__ import annotations

import torch
from torch import nn

from tp.errors import ConfigError
from tp.kernels.int8_weight import Int8Weight
from tp.layers.linear import RowParallelLinear
from tp.layers.parameter import ParallelModule

WEIGHTS = ("int8",)
"""What weights may be turned into."""


@torch.no_grad()
def prepare_for_inference(model: nn.Module, weights: str) -> None:
    """Replaces every matrix (linears, embedding, LM head) by its int8 form, one at a time. Every rank calls it.

    Scales are those of whole rows, so that the integers are the same at every tensor-parallel degree. Afterwards the
    model can neither be trained nor saved: both raise `RequestError`.

    Args:
        weights: "int8".

    Raises:
        ConfigError: any other kind of weights.
    """
    if weights not in WEIGHTS:
        raise ConfigError(f"weights {weights!r} are not supported: {', '.join(WEIGHTS)}")
    made: dict[int, Int8Weight] = {}
    for module in list(model.modules()):
        if not isinstance(module, ParallelModule) or not isinstance(module._parameters.get("weight"), nn.Parameter):
            continue
        weight = module._parameters["weight"]
        assert weight is not None
        if weight.dim() == 2:
            if id(weight) not in made:
                made[id(weight)] = _int8(module, weight)
            del module.weight
            module.weight = made[id(weight)]


def _int8(module: ParallelModule, weight: torch.Tensor) -> Int8Weight:
    largest = weight.abs().amax(1)
    if isinstance(module, RowParallelLinear):  # this rank has only some columns of each row
        communicator = module.group.communicator
        largest = communicator.all_gather(largest.unsqueeze(0), [1] * module.group.size).amax(0)
    return Int8Weight(weight, largest)
