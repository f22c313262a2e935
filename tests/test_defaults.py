"""Scripts set torch's defaults for their own tensors: a dtype, a device. Ours say what they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from generation_models import tiny_model
from pool import RankPool

from tp.generation import GenerationOptions, SamplingParameters
from tp.models import prepare_for_inference
from tp.parallel import TensorParallelGroup
from tp.training.optimizer import set_step_count

PROMPTS = [[5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8], [9]]
DRAWN = SamplingParameters(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2)
Generated = list[tuple[tuple[int, ...], tuple[float, ...]]]


@contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def generated(group: TensorParallelGroup, dtype: torch.dtype, device: str) -> Generated:
    """Greedy in float32, and drawn in bfloat16 from int8 weights; ids and log-probabilities."""
    sequences = []
    with defaults(dtype, device):
        for weights, sampling in (("float32", SamplingParameters()), ("int8", DRAWN)):
            model = tiny_model(group, dtype=torch.bfloat16 if weights == "int8" else torch.float32)
            if weights == "int8":
                prepare_for_inference(model, "int8")
            sequences += model.generate(PROMPTS, GenerationOptions(9, ignore_eos=True, sampling=sampling)).sequences
    return [(sequence.new_ids, sequence.logprobs) for sequence in sequences]


@pytest.mark.parametrize("t", [1, 2])
def test_generation_does_not_depend_on_them(ranks: RankPool, t: int) -> None:
    """A device without memory stands for any other than the group's."""
    expected = ranks(t).run(generated, torch.float32, "cpu")
    for dtype, device in ((torch.bfloat16, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")):
        assert ranks(t).run(generated, dtype, device) == expected, (dtype, device)


def test_a_step_count_is_exact() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    with defaults(torch.bfloat16, "cpu"):
        set_step_count(optimizer, 257)
    assert optimizer.state[parameter]["step"].item() == 257
