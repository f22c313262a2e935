"""Settings of the rotary embedding in a GGUF file, as a Hub config spells them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tp.checkpoint.file_reader import FileReader, bytes_of
from tp.checkpoint.gguf_header import GgufHeader
from tp.errors import CheckpointError
from tp.layers.rope_frequencies import default_inverse_frequencies, llama3_inverse_frequencies
from tp.rope_config import RopeConfig

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor, [head_dim / 2] float32, by which llama.cpp divides the frequencies of a llama3-scaled model."""

_TOLERANCE = 1e-5
_USUAL_BANDS = ((1.0, 4.0, 8192), *((1.0, 4.0, 2**k) for k in range(2, 22)))
_FLOAT32 = 0  # ggml's number of the type
_MOST_FACTORS = 2**16  # above half of any head_dim


def read_rope_factors(header: GgufHeader) -> Tensor | None:
    """The values of `ROPE_FACTORS`, None where the file has no such tensor.

    Raises:
        CheckpointError: they are no float32 vector, or the file ends before them.
    """
    stored = header.tensors.get(ROPE_FACTORS)
    if stored is None:
        return None
    if len(stored.shape) != 1 or stored.type_id != _FLOAT32 or stored.numel > _MOST_FACTORS:
        raise CheckpointError(f"{header.path}: {ROPE_FACTORS} is not a float32 vector of at most {_MOST_FACTORS}")
    values = torch.empty(stored.numel, dtype=torch.float32, device="cpu")
    file = FileReader(header.path)
    try:
        file.read_runs(stored.offset, values.nbytes, values.nbytes, bytes_of(values))
    finally:
        file.close()
    return values


def rope_parameters(
    take: Callable[[str, Any], Any], head_dim: int, context_length: int, factors: Tensor | None
) -> dict[str, Any]:
    """The `rope_parameters` of a Hub config.

    Args:
        take: gives a metadata value by its key without the architecture's prefix, or the default.
        context_length: of the model; that of the training where the file names no other.
        factors: the values of `ROPE_FACTORS`, where the file has them.

    Raises:
        CheckpointError: a scaling type or setting that has no counterpart here.
    """
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": float(take("rope.freq_base", 10000.0))}
    legacy_factor = take("rope.scale_linear", 0.0)
    factor = float(take("rope.scaling.factor", 0.0) or legacy_factor)
    original_context = take("rope.scaling.original_context_length", context_length)
    kind = take("rope.scaling.type", "linear")  # llama.cpp's reading of a factor without a type
    if kind == "yarn":
        parameters |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original_context}
        for name in ("beta_fast", "beta_slow"):
            if (value := take(f"rope.scaling.yarn_{name}", None)) is not None:
                parameters[name] = float(value)
    elif kind == "linear" and factor not in (0.0, 1.0):
        parameters |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "linear"):
        raise CheckpointError(f"rope scaling type {kind!r} is not supported: choose from none, linear, yarn")
    if factors is None or bool((factors == 1).all()):
        return parameters
    if 2 * len(factors) != head_dim:
        raise CheckpointError(f"{ROPE_FACTORS} has {len(factors)} values for a head_dim of {head_dim}")
    if parameters["rope_type"] != "default":
        raise CheckpointError(f"{ROPE_FACTORS} together with rope scaling type {kind!r} is not supported")
    return parameters | _llama3_parameters(factors, parameters["rope_theta"], head_dim)


def llama3_factors(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float64: by what the llama3 rope type divides each frequency."""
    plain = default_inverse_frequencies(rope.rope_theta, head_dim).double()
    return plain / llama3_inverse_frequencies(plain, rope)


def _llama3_parameters(factors: Tensor, rope_theta: float, head_dim: int) -> dict[str, Any]:
    """Finds the llama3 settings whose factors these are: files keep the factors, not the settings.

    Only the ends of the band count, original_context / low and original_context / high, so low is taken as 1
    as in every published model.
    """
    given = factors.double()
    factor = round(float(given.max()), 4)
    bands = (_USUAL_BANDS[0], *_fitted_band(given, factor, rope_theta, head_dim), *_USUAL_BANDS[1:])
    for low, high, context in bands if factor > 1 else ():
        rope = RopeConfig("llama3", rope_theta, factor, context, low, high)
        if torch.allclose(llama3_factors(rope, head_dim), given, rtol=_TOLERANCE, atol=0):
            return {name: value for name, value in rope.to_hf().items() if name != "rope_theta"}
    raise CheckpointError(f"{ROPE_FACTORS} are not those of any llama3 rope scaling: they are not supported")


def _fitted_band(given: Tensor, factor: float, rope_theta: float, head_dim: int) -> list[tuple[float, float, int]]:
    """The band (low = 1, high, original context) from two interpolated factors, whose 1/f is linear in 1/wavelength."""
    turns_per_token = default_inverse_frequencies(rope_theta, head_dim).double() / (2 * math.pi)
    points = [
        (turns, (1.0 / value - 1.0 / factor) / (1.0 - 1.0 / factor))
        for turns, value in zip(turns_per_token.tolist(), given.tolist(), strict=True)
        if 1.0 < value < factor * (1 - 1e-6)
    ]
    if len(points) < 2:
        return []
    (x0, y0), (x1, y1) = points[0], points[-1]
    slope = (y1 - y0) / (x1 - x0)
    intercept = y0 - slope * x0  # = -low / (high - low)
    if intercept >= 0:
        return []
    high = round(1.0 - 1.0 / intercept, 3)
    return [(1.0, high, round(slope * (high - 1.0)))]
