"""int8 weights: the same integers at every degree, the arithmetic of the rounded weights, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from generation_models import tiny_model
from pool import RankPool
from tiny_models import TINY_CONFIGS, hub_config, parallel_model, transformers_model
from torch import Tensor

from tp.checkpoint import save_checkpoint
from tp.errors import AutogradError, ConfigError, RequestError
from tp.kernels.embedding_lookup import embedding_lookup
from tp.kernels.int8_weight import Int8Weight
from tp.kernels.linear import FEW_ROWS, linear
from tp.models import prepare_for_inference
from tp.parallel import TensorParallelGroup


def random(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, columns", [(1, 77), (2, 77), (7, 77), (FEW_ROWS, 77), (40, 77), (40, 78)])
def test_linear_computes_with_the_rounded_weight(rows: int, columns: int, dtype: torch.dtype) -> None:
    weight, bias = random(9, columns, dtype=dtype), random(9, dtype=dtype)
    weight[4] = 0
    int8 = Int8Weight(weight, weight.abs().amax(1))
    assert (int8.values.abs().amax(1)[torch.arange(9) != 4] == 127).all()
    rounded = int8.values.double() * int8.scales.double().unsqueeze(1)
    assert ((rounded - weight.double()).abs() <= int8.scales.double().unsqueeze(1) * 0.5001).all()
    x = random(rows, columns, dtype=dtype)
    exact = x.double() @ rounded.t() + bias.double()
    scale = x.double().abs().amax(1, keepdim=True) * rounded.abs().sum(1)  # x itself may be rounded to 16 bits
    error = (linear(x, int8, bias).double() - exact).abs()
    assert (
        error <= torch.finfo(dtype).eps / 2 * exact.abs() + scale / (65000 if dtype == torch.bfloat16 else 1e6)
    ).all()
    assert torch.equal(int8.rows(torch.tensor([3, 0])), rounded[[3, 0]].to(dtype))


@pytest.mark.parametrize("columns", [896, 20011])
def test_the_largest_products_do_not_overflow(columns: int) -> None:
    weight = torch.ones(5, columns, dtype=torch.bfloat16)
    weight[1] *= -1
    weight[2, 1::2] = -1
    int8 = Int8Weight(weight, weight.abs().amax(1))
    for rows in (1, 3):
        y = linear(torch.full((rows, columns), 3.0, dtype=torch.bfloat16), int8)
        exact = torch.tensor([3.0, -3.0, 3.0 * (columns % 2) / columns, 3.0, 3.0]) * columns
        torch.testing.assert_close(y.float(), exact.expand(rows, -1), rtol=0.004, atol=1e-3)


def test_gradients_are_refused() -> None:
    int8 = Int8Weight(random(4, 33), torch.full((4,), 3.0))
    with pytest.raises(AutogradError, match="no gradients"):
        linear(random(2, 33).requires_grad_(), int8)


def test_what_is_not_finite_shows() -> None:
    int8 = Int8Weight(random(4, 33, dtype=torch.bfloat16), torch.full((4,), 3.0))
    for value in (float("nan"), float("inf")):
        x = random(2, 33, dtype=torch.bfloat16)
        x[1, 5] = value
        y = linear(x, int8)
        assert y[0].isfinite().all() and not y[1].isfinite().any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_show(value: float) -> None:
    weight = random(4, 33)
    weight[2, 7] = value
    int8 = Int8Weight(weight, weight.abs().amax(1))
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 3, 40):
            y = linear(random(rows, 33, dtype=dtype), int8)
            assert not y[:, 2].isfinite().any() and y[:, [0, 1, 3]].isfinite().all()
    assert not int8.rows(torch.tensor([2])).isfinite().any()


def logits_and_integers(
    group: TensorParallelGroup, config: dict[str, Any], weights: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with int8 weights, and the integers of a row-parallel and a column-parallel weight, gathered."""
    model = parallel_model(config, weights, group)
    prepare_for_inference(model, "int8")
    layer = model.model.layers[0]
    down, head = layer.mlp.down_proj.weight.values, model.lm_head.weight.values
    gather = group.communicator.all_gather_object
    with torch.no_grad():
        logits = model(torch.arange(11).reshape(1, 11))
    return logits, torch.cat(gather(down), dim=1), torch.cat(gather(head))[: model.config.vocab_size]


@pytest.mark.parametrize("family", sorted(TINY_CONFIGS))
def test_integers_and_logits_are_the_same_at_every_degree(ranks: RankPool, family: str) -> None:
    original = transformers_model(family)
    arguments = hub_config(family), original.state_dict()
    expected = ranks(1).run(logits_and_integers, *arguments)[0]
    with torch.no_grad():
        reference = original(torch.arange(11).reshape(1, 11)).logits
    assert (expected[0] - reference).abs().max() < 0.05 * reference.abs().max()
    for tp_size in (2, 3):
        for logits, down, head in ranks(tp_size).run(logits_and_integers, *arguments):
            torch.testing.assert_close(logits, expected[0], atol=1e-4, rtol=0)
            assert torch.equal(down, expected[1])
            assert torch.equal(head, expected[2])


def logits_of_two_features(group: TensorParallelGroup) -> Tensor:
    model = tiny_model(group, {"intermediate_size": 2})
    prepare_for_inference(model, "int8")
    with torch.no_grad():
        return model(torch.arange(11).reshape(1, 11))


def test_a_rank_may_have_no_columns(ranks: RankPool) -> None:
    expected = ranks(1).run(logits_of_two_features)[0]
    for logits in ranks(3).run(logits_of_two_features):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_weight_may_have_strides() -> None:
    weight = random(40, 9).t()
    int8 = Int8Weight(weight, weight.abs().amax(1))
    with torch.no_grad():
        rows = embedding_lookup(int8, torch.tensor([3, 8, 0]))
    torch.testing.assert_close(rows, weight[[3, 8, 0]], atol=0.02, rtol=0)


def test_training_saving_and_other_weights_are_refused(tmp_path: Path) -> None:
    weights = transformers_model("qwen2").state_dict()
    model = parallel_model(hub_config("qwen2"), weights, TensorParallelGroup.alone())
    with pytest.raises(ConfigError, match="int3"):
        prepare_for_inference(model, "int3")
    prepare_for_inference(model, "int8")
    with pytest.raises(RequestError, match="inference only"):
        save_checkpoint(model, tmp_path / "saved")
    with pytest.raises(RequestError, match="inference only"):
        model.train()
    assert model.eval() is model
