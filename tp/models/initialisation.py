"""Random parameters that are the same model at every tensor-parallel degree."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import nn

from tp.layers.parameter import NamedParameter, named_parts
from tp.parallel.partition import Part, ceil_div

ROWS_PER_DRAW = 64
"""Rows of a Hub tensor that one generator draws: the unit in which a shard can be drawn alone."""

StandardDeviation = Callable[[str, tuple[int, int]], float]
"""Of a matrix, from its Hub name and its global shape, (output features, input features), whatever a rank holds."""


def xavier_normal(name: str, shape: tuple[int, int]) -> float:
    """√(2 / (fan_in + fan_out)): keeps variances through linear layers, both ways (Glorot and Bengio 2010)."""
    return float((2 / sum(shape)) ** 0.5)


@torch.no_grad()
def initialise_parameters(model: nn.Module, seed: int, std: float | StandardDeviation = 0.02) -> None:
    """Matrices from N(0, std²), norm weights 1, biases and padding 0, as transformers initialises these families.

    What is drawn depends on (seed, Hub name, row block) only: gathered weights are bitwise equal at every t.

    Args:
        std: of all matrices, or a rule that gives each its own, as `xavier_normal`.
    """
    for parameter in named_parts(model):
        parameter.tensor.zero_()
        for part in parameter.parts:
            if parameter.tensor.dim() == 2:
                deviation = std if isinstance(std, (int, float)) else std(part.name, _global_shape(parameter, part))
                _draw_part(parameter, part, seed, deviation)
            elif part.name.endswith("norm.weight"):
                parameter.slice_of(part).fill_(1.0)


def _global_shape(parameter: NamedParameter, part: Part) -> tuple[int, int]:
    rows, columns = parameter.tensor.shape
    return (part.global_length, columns) if part.dim == 0 else (rows, part.global_length)


def _draw_part(parameter: NamedParameter, part: Part, seed: int, std: float) -> None:
    target = parameter.slice_of(part)
    num_columns = _global_shape(parameter, part)[1]
    if part.dim == 0:
        rows, columns = range(part.global_start, part.global_start + part.length), slice(None)
    else:
        rows, columns = range(target.shape[0]), slice(part.global_start, part.global_start + part.length)
    for block in range(rows.start // ROWS_PER_DRAW, ceil_div(rows.stop, ROWS_PER_DRAW)):
        drawn = _draw_block(f"{seed}/{part.name}/{block}", num_columns) * std
        first = max(rows.start, block * ROWS_PER_DRAW)
        last = min(rows.stop, (block + 1) * ROWS_PER_DRAW)
        taken = drawn[first - block * ROWS_PER_DRAW : last - block * ROWS_PER_DRAW, columns]
        target[first - rows.start : last - rows.start] = taken


def _draw_block(key: str, num_columns: int) -> torch.Tensor:
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.randn(ROWS_PER_DRAW, num_columns, generator=generator, dtype=torch.float32, device="cpu")
