"""Random initialisation is one model, whatever the degree."""

from __future__ import annotations

import pytest
import torch
from tiny_models import TINY_CONFIGS, hub_config

from tp.config import ModelConfig
from tp.layers.parameter import named_parts
from tp.models import CausalLM, initialise_parameters


def _pieces(group, config):
    """Every part of every parameter of this rank, with where it lies; and whether padding is zero."""
    model = CausalLM(ModelConfig.from_hf(config), group)
    initialise_parameters(model, seed=0)
    return [
        (part.name, part.dim, part.global_start, part.global_length, parameter.slice_of(part).detach().clone())
        for parameter in named_parts(model)
        for part in parameter.parts
    ]


def assemble(outcomes):
    """Whole tensors from the pieces of all ranks; ranks that share a piece must hold the same bits."""
    whole = {}
    for pieces in outcomes:
        for name, dim, start, length, piece in pieces:
            if name not in whole:
                shape = list(piece.shape)
                shape[dim] = length
                whole[name] = torch.full(shape, float("nan"), dtype=piece.dtype)
            target = whole[name].narrow(dim, start, piece.shape[dim])
            assert target.isnan().all() or torch.equal(target, piece), name
            target.copy_(piece)
    return whole


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_gathered_weights_are_bitwise_equal_at_every_degree(ranks, family):
    config = hub_config(family)
    expected = assemble(ranks(1).run(_pieces, config))
    matrices = [tensor for tensor in expected.values() if tensor.dim() == 2]
    assert all(0.01 < tensor.std() < 0.03 for tensor in matrices)
    assert not torch.equal(matrices[-1][0], matrices[-1][1])
    for t in (2, 3, 4):
        actual = assemble(ranks(t).run(_pieces, config))
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(actual[name], tensor), name
