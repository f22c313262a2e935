"""The parallel layers alone, each against the dense computation, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from tp.errors import LayoutError
from tp.kernels.gated_activation import activation_and_mul
from tp.kernels.rms_norm import rms_norm
from tp.layers import (
    ColumnParallelLinear,
    GatedMLP,
    LayerNorm,
    MergedColumnParallelLinear,
    ParallelLMHead,
    Partial,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    merged_columns,
)
from tp.layers.parameter import named_parts
from tp.parallel import TensorParallelGroup

DEGREES = [1, 2, 3, 4]


def fill(module, whole):
    """Copies whole Hub-named tensors into this rank's parameters."""
    for parameter in named_parts(module):
        for part in parameter.parts:
            slice_ = whole[part.name].narrow(part.dim, part.global_start, part.length)
            parameter.slice_of(part).data.copy_(slice_)


def _row_bias(group):
    layer = RowParallelLinear(4, 3, group, bias=True)
    fill(nn.ModuleDict({"row": layer}), {"row.weight": torch.ones(3, 4), "row.bias": torch.tensor([100.0, 200, 300])})
    owned = layer.parameter_parts["weight"][0]
    x = torch.tensor([[1.0, 2, 3, 4]])[:, owned.global_start : owned.global_start + owned.length]
    y = layer(x).reduce()
    layer(x.expand(5, -1)).reduce().sum().backward()
    return y.tolist(), layer.bias.grad.tolist()


@pytest.mark.parametrize("t", DEGREES)
def test_row_parallel_bias_is_added_once_and_its_gradient_is_whole_on_every_rank(ranks, t):
    """Adding it on every rank gives [210, 410, 610] at t = 2; bias / t gives a gradient of 5 / t."""
    for y, gradient in ranks(t).run(_row_bias):
        assert y == [[110.0, 210.0, 310.0]]
        assert gradient == [5.0, 5.0, 5.0]


def _shown(group):
    """The vocabulary is so small that the last of four ranks has no row."""
    qkv = QKVParallelLinear(60, 10, 6, 2, group, bias=True)
    mlp = GatedMLP(60, 300, "silu", group)
    parts = [qkv, mlp.gate_up_proj, mlp.down_proj, ColumnParallelLinear(60, 300, group), RMSNorm(60, 1e-6, group)]
    return [repr(part) for part in [*parts, LayerNorm(60, 1e-5, group), VocabParallelEmbedding(9, 60, group)]]


def test_layers_show_their_sizes_and_this_ranks_share(ranks):
    shown = ranks(4).run(_shown)
    assert shown[0] == [
        "QKVParallelLinear(in_features=60, q_proj=10 of 60, k_proj=10 of 20, v_proj=10 of 20, bias=True, rank=0 of 4)",
        "MergedColumnParallelLinear(in_features=60, gate_proj=128 of 300, up_proj=128 of 300, bias=False, rank=0 of 4)",
        "RowParallelLinear(in_features=128 of 300, out_features=60, bias=False, rank=0 of 4)",
        "ColumnParallelLinear(in_features=60, out_features=128 of 300, bias=False, rank=0 of 4)",
        "RMSNorm(60, eps=1e-06)",
        "LayerNorm(60, eps=1e-05)",
        "VocabParallelEmbedding(vocab_size=3 of 9, hidden_size=60, rank=0 of 4)",
    ]
    assert shown[3][2] == "RowParallelLinear(in_features=44 of 300, out_features=60, bias=False, rank=3 of 4)"
    assert shown[3][-1] == "VocabParallelEmbedding(vocab_size=0 of 9, hidden_size=60, rank=3 of 4)"


class OwnMLP(nn.Module):
    """A module of a user's own, on a group that the user passes."""

    def __init__(self, width, inner, group):
        super().__init__()
        self.up = ColumnParallelLinear(width, inner, group, bias=True, dtype=torch.float64)
        self.down = RowParallelLinear(inner, width, group, bias=True, dtype=torch.float64)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))).reduce()


def _own_mlp(group, whole, x):
    mlp = OwnMLP(x.shape[1], whole["up.bias"].numel(), group)
    fill(mlp, whole)
    x = x.requires_grad_()
    y = mlp(x)
    (y * torch.arange(y.numel()).view_as(y)).sum().backward()
    gradients = [
        (part.name, part.global_start, parameter.tensor.grad.narrow(part.dim, part.local_start, part.length), part.dim)
        for parameter in named_parts(mlp)
        for part in parameter.parts
    ]
    return y, x.grad, gradients


@pytest.mark.parametrize("t", DEGREES)
@pytest.mark.parametrize("inner", [5, 77, 200])
def test_an_mlp_of_ones_own_equals_the_dense_one(ranks, t, inner):
    generator = torch.Generator().manual_seed(inner)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    whole = {"up.weight": draw(inner, 7), "up.bias": draw(inner), "down.weight": draw(7, inner), "down.bias": draw(7)}
    x = draw(3, 7)
    dense = {name: tensor.clone().requires_grad_() for name, tensor in whole.items()}
    dense_x = x.clone().requires_grad_()
    hidden = torch.tanh(functional.linear(dense_x, dense["up.weight"], dense["up.bias"]))
    expected = functional.linear(hidden, dense["down.weight"], dense["down.bias"])
    (expected * torch.arange(expected.numel()).view_as(expected)).sum().backward()
    for y, x_gradient, gradients in ranks(t).run(_own_mlp, whole, x):
        torch.testing.assert_close(y, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(x_gradient, dense_x.grad, rtol=1e-12, atol=1e-12)
        for name, start, gradient, dim in gradients:
            part = dense[name].grad.narrow(dim, start, gradient.shape[dim])
            torch.testing.assert_close(gradient, part, rtol=1e-12, atol=1e-12)


def _vocabulary(group, table, ids):
    embedding = VocabParallelEmbedding(*table.shape, group)
    head = ParallelLMHead(*table.shape, group)
    model = nn.ModuleDict({"embedding": embedding, "head": head})
    fill(model, {"embedding.weight": table, "head.weight": table.flip(0)})
    x = embedding(ids).reduce()
    logits = head(x)
    logits.whole().sum().backward()
    real = len(embedding.vocab_range)
    return x, logits.whole(), logits.num_valid, head.weight.grad[real:], embedding.weight.grad[real:], head.weight.shape


@pytest.mark.parametrize("t", DEGREES)
@pytest.mark.parametrize("vocab", [97, 5])
def test_vocabulary_that_does_not_divide_is_padded_and_the_padding_never_seen(ranks, t, vocab):
    table = torch.randn(vocab, 6, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([0, vocab - 1, 3, vocab - 1])
    outcomes = ranks(t).run(_vocabulary, table, ids)
    assert sum(outcome[2] for outcome in outcomes) == vocab
    for x, logits, _, head_padding, embedding_padding, shape in outcomes:
        assert torch.equal(x, table[ids])
        assert logits.shape == (4, vocab)
        torch.testing.assert_close(logits, table[ids] @ table.flip(0).T)
        assert shape[0] == -(-vocab // t)
        assert not head_padding.any()
        assert not embedding_padding.any()


def test_what_is_no_tensor_is_refused_by_type():
    group = TensorParallelGroup.alone()
    layer = ColumnParallelLinear(4, 3, group)
    with pytest.raises(LayoutError, match=r"not a Partial: call .reduce\(\) first"):
        layer(Partial(torch.ones(2, 4), group))


def _local_sizes(group):
    qkv = QKVParallelLinear(8, 4, 6, 2, group)
    merged = MergedColumnParallelLinear(8, merged_columns({"gate_proj": 130, "up_proj": 130}, group), group)
    return qkv.local_sizes, merged.local_sizes, [p.name for p in qkv.parameter_parts["weight"]]


def test_fused_linears_hold_this_ranks_part_of_each(ranks):
    sizes = ranks(4).run(_local_sizes)
    assert [s[0] for s in sizes] == [[4, 4, 4], [8, 4, 4], [4, 4, 4], [8, 4, 4]]
    assert [s[1] for s in ranks(2).run(_local_sizes)] == [[128, 128], [2, 2]]
    assert sizes[0][2] == ["q_proj", "k_proj", "v_proj"]


def test_a_parameter_outside_parallel_modules_is_named():
    model = nn.ModuleDict({"mlp": GatedMLP(4, 5, "silu", TensorParallelGroup.alone()), "extra": nn.Linear(2, 2)})
    with pytest.raises(TypeError, match=r"extra\.weight belongs to a Linear"):
        list(named_parts(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_rms_norm_has_the_rounding_points_of_transformers(dtype):
    norm = RMSNorm(33, 1e-5, TensorParallelGroup.alone(), dtype=torch.float32)
    norm.weight.data.copy_(torch.linspace(-2, 2, 33))
    x = (torch.randn(5, 33, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    before = x.clone()
    wide = x.double() if dtype == torch.float64 else x.float()
    expected = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype) * norm.weight.to(dtype)
    assert torch.equal(norm(x), expected)
    assert norm(x).dtype == dtype
    assert torch.equal(x, before)


def test_rms_norm_of_three_and_four():
    norm = RMSNorm(2, 0.0, TensorParallelGroup.alone())
    torch.testing.assert_close(norm(torch.tensor([3.0, 4.0])), torch.tensor([0.8485281, 1.1313708]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_rms_norm_backward_is_that_of_its_formula_and_leaves_its_inputs_alone(dtype):
    generator = torch.Generator().manual_seed(4)
    x = (torch.randn(3, 5, 11, generator=generator) * 2).to(dtype).transpose(0, 1).requires_grad_()
    weight = torch.randn(11, generator=generator).to(dtype).requires_grad_()
    dy = torch.randn(5, 3, 11, generator=generator).to(dtype)
    kept = dy.clone(), x.detach().clone()
    y = rms_norm(x, weight, 1e-5)
    (y + 0 * x).backward(dy)  # two consumers of x
    assert torch.equal(dy, kept[0])
    assert torch.equal(x.detach(), kept[1])

    wide_x, wide_weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    normed = wide_x * torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + 1e-5)
    (normed * wide_weight).backward(dy.double())
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2}[dtype]
    for mine, exact in ((x.grad, wide_x.grad), (weight.grad, wide_weight.grad)):
        assert (mine.double() - exact).abs().max() <= tolerance * exact.abs().max()


def test_rms_norm_backward_of_three_and_four():
    x, weight = torch.tensor([3.0, 4.0]), torch.ones(2, requires_grad=True)
    rms_norm(x, weight, 0.0).backward(torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(weight.grad, torch.tensor([0.8485281, 0.0]))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_gated_activation_backward(activation):
    gate_up = torch.randn(4, 14, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda value: activation_and_mul(value, activation), gate_up)
    with torch.no_grad():
        plain = activation_and_mul(gate_up, activation)
    assert torch.equal(plain, activation_and_mul(gate_up, activation).detach())
