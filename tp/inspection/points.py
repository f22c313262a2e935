"""The named points of a forward, and which site each of them is.

    resid_pre → attention → + attn_out → resid_mid → MLP → + mlp_out → resid_post

Names as in TransformerLens. `resid_pre` of a later layer is `resid_post` of the one before: one value, seen once.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from tp.config import ModelConfig
from tp.errors import RequestError
from tp.layers.tap import Site

OF_NO_LAYER = ("embed", "final_norm")
STREAM_POINTS = ("embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post", "final_norm")
"""Rows of width D: writes and states of the residual stream, and what the LM head reads."""
HEAD_POINTS = ("z", "pattern")
"""Per query head: what it gives to the output projection, and its attention weights."""
POINTS = STREAM_POINTS + HEAD_POINTS


def site_of(point: str, layer: int | None, config: ModelConfig) -> Site:
    """The site that a point of a layer is.

    Raises:
        RequestError: there is no such point or layer, or the point takes a layer and has none, or has one too many.
    """
    _check_point(point)
    if point in OF_NO_LAYER:
        if layer is not None:
            raise RequestError(f"{point} belongs to no layer, but layer {layer} was given")
        return Site(None, point)
    if layer is None:
        raise RequestError(f"{point} belongs to a layer: say which, 0 to {config.num_layers - 1}")
    layer = checked_layer(layer, config)
    return Site(layer - 1, "resid_post") if point == "resid_pre" and layer > 0 else Site(layer, point)


def sites_of(points: Collection[str], layers: Sequence[int] | None, config: ModelConfig) -> frozenset[Site]:
    """The sites of some points in some layers (None: in all).

    Raises:
        RequestError: a point or layer that there is not.
    """
    if isinstance(points, str):
        raise RequestError(f"points is {points!r}: give a list of points")
    layers = range(config.num_layers) if layers is None else integers("layers", layers)
    for layer in layers:  # also where no point takes one
        checked_layer(layer, config)
    for point in points:
        _check_point(point)
    of_layers = [(point, layer) for point in points if point not in OF_NO_LAYER for layer in layers]
    of_none = [(point, None) for point in points if point in OF_NO_LAYER]
    return frozenset(site_of(point, layer, config) for point, layer in [*of_layers, *of_none])


def describe(site: Site) -> str:
    """For messages: "attn_out of layer 3", "embed"."""
    return site.point if site.layer is None else f"{site.point} of layer {site.layer}"


def checked_layer(layer: int, config: ModelConfig) -> int:
    """The layer as an int; raises `RequestError` where the model has no such one."""
    layer = integer("layer", layer)
    if not 0 <= layer < config.num_layers:
        raise RequestError(f"layer {layer} is outside 0..{config.num_layers - 1}, the layers of this model")
    return layer


def check_heads(heads: Sequence[int], config: ModelConfig) -> None:
    """Raises `RequestError` where the model has no such query head, or one is named twice."""
    for head in heads:
        if not 0 <= head < config.num_attention_heads:
            raise RequestError(
                f"head {head} is outside 0..{config.num_attention_heads - 1}, the query heads of a layer"
            )
    if len(set(heads)) < len(heads):
        raise RequestError(f"heads {list(heads)} name one of them twice")


def integers(what: str, numbers: Iterable[int]) -> tuple[int, ...]:
    """Layers, positions or heads as ints. A tensor of them is taken too, a mask is not.

    Raises:
        RequestError: something else than whole numbers.
    """
    try:
        given = list(numbers)
    except TypeError as error:
        raise RequestError(f"{what} is {numbers!r}: give a list of whole numbers") from error
    return tuple(integer(f"one of {what}", number) for number in given)


def integer(what: str, number: Any) -> int:
    """A whole number as an int: tensors hash by identity, so that one of them would be found nowhere.

    Raises:
        RequestError: something else, a truth value for example.
    """
    if not isinstance(number, bool) and getattr(number, "dtype", None) is not torch.bool:
        with contextlib.suppress(TypeError):
            return operator.index(number)
    raise RequestError(f"{what} is {number!r}: it must be a whole number")


def _check_point(point: str) -> None:
    if point not in POINTS:
        raise RequestError(f"there is no point {point!r}: choose from {', '.join(POINTS)}")
