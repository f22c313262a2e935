"""The floating-point dtypes that models run in and checkpoints hold, by their names in Hub configs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype: "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
