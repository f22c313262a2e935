"""Tests of the Triton kernels: compiled where there is a GPU, else interpreted, which needs a process of its own.

`tests/test_triton_kernels.py` starts that process. Elsewhere nothing is collected here.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Distant = Callable[[Tensor], Tensor]
_FAR = 2**30 + 16
_ROOM = 2**16

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    import interpreter_repairs

    from tp import choice

    interpreter_repairs.install()
    choice.disable("native")  # the C++ kernels come first where tensors are on the CPU
elif not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(scope="session")
def distant(device: torch.device) -> Distant:
    """`distant(contents)`: a view whose entries along dim 0 lie 2^30 + 16 elements apart, so the third past 2^31.

    It has the contents of a [3, ...] bfloat16 tensor. On the CPU the pages in between are never touched. One storage
    serves all, at places of their own.
    """
    storage = torch.empty(2 * _FAR + _ROOM, dtype=torch.bfloat16, device=device)
    used = 0

    def place(contents: Tensor) -> Tensor:
        nonlocal used
        shape, strides = contents.shape, contents[0].contiguous().stride()
        view = storage.as_strided(shape, (_FAR, *strides), used)
        used += contents[0].numel()
        assert used <= _ROOM
        return view.copy_(contents)

    return place


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)
