"""One explicit step that trades a model's weights for smaller ones that only inference can use."""

from __future__ import annotations

import torch
from torch import nn

from tp.errors import ConfigError
from tp.huge_pages import Block, give_back
from tp.kernels.int8_weight import Int8Weight
from tp.layers.linear import RowParallelLinear
from tp.layers.parameter import ParallelModule

WEIGHTS = ("int8",)
"""What weights may be turned into."""


@torch.no_grad()
def prepare_for_inference(model: nn.Module, weights: str) -> None:
    """Replaces every matrix (linears, embedding, LM head) by its int8 form, one at a time. Every rank calls it.

    Scales are those of whole rows, so that the integers are the same at every tensor-parallel degree. Afterwards the
    model can neither be trained nor saved: both raise `RequestError`. The memory of weights that were loaded or
    initialised together is given back at once: who still holds one of those reads zeros.

    Args:
        weights: "int8".

    Raises:
        ConfigError: any other kind of weights.
    """
    if weights not in WEIGHTS:
        raise ConfigError(f"weights {weights!r} are not supported: {', '.join(WEIGHTS)}")
    matrices = [(module, weight) for module in model.modules() if (weight := _matrix_of(module)) is not None]
    shapes = {id(weight): weight.shape for _, weight in matrices}
    block = Block(sum(Block.bytes_for(shape, torch.int8) for shape in shapes.values()))
    made: dict[int, Int8Weight] = {}
    while matrices:
        module, weight = matrices.pop(0)
        if id(weight) not in made:
            made[id(weight)] = _int8(module, weight, block)
        del module.weight
        module.weight = made[id(weight)]


def _matrix_of(module: nn.Module) -> nn.Parameter | None:
    weight = module._parameters.get("weight") if isinstance(module, ParallelModule) else None
    return weight if weight is not None and weight.dim() == 2 else None


def _int8(module: nn.Module, weight: torch.Tensor, block: Block) -> Int8Weight:
    largest = weight.abs().amax(1) if weight.shape[1] else weight.new_zeros(len(weight))
    if isinstance(module, RowParallelLinear):  # this rank has only some columns of each row
        largest = module.group.communicator.all_gather_stacked(largest).amax(0)
    int8 = Int8Weight(weight, largest)
    if weight.is_cpu:
        int8.values = block.empty(weight.shape, torch.int8).copy_(int8.values)
        give_back(weight)
    return int8
