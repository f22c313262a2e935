"""The conjugate pairs: gradcheck of each against the dense program, in float64, at every degree."""

from __future__ import annotations

import pytest
import torch

from tp.parallel import mappings

SIZES = [2, 0, 3, 1]


def _sizes(group):
    return SIZES[: group.size]


# Each takes this rank's input and returns this rank's output; `dense` is the same as one function of all inputs.
OPERATIONS = {
    "copy": (lambda x, g: mappings.copy_to_tensor_parallel_region(x, g), "replicated", "partial"),
    "reduce": (lambda x, g: mappings.reduce_from_tensor_parallel_region(x, g), "partial", "replicated"),
    "gather, partial gradients": (
        lambda x, g: mappings.gather_from_sequence_parallel_region(x, g, _sizes(g)),
        "rows",
        "partial",
    ),
    "reduce-scatter": (
        lambda x, g: mappings.reduce_scatter_to_sequence_parallel_region(x, g, _sizes(g)),
        "partial",
        "rows",
    ),
    "split": (lambda x, g: mappings.split_to_region(x, g, _sizes(g)), "replicated", "rows"),
    "gather, whole gradients": (lambda x, g: mappings.gather_from_region(x, g, _sizes(g)), "rows", "replicated"),
}


def _draw(seed, rows):
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _run(group, name):
    """This rank's output, input gradient and whether the input was mutated, with a strided input used twice.

    The loss of a rank is Σ w·y with weights of its own where its output is its own or partial, and with the same
    weights, counted once, where the output is consumed alike on every rank.
    """
    operation, kind_in, kind_out = OPERATIONS[name]
    total = sum(_sizes(group))
    if kind_in == "replicated":
        x = _draw(0, total)
    elif kind_in == "partial":
        x = _draw(group.rank, total)
    else:
        x = _draw(0, total).split(_sizes(group))[group.rank]
    x = x.t().contiguous().t().requires_grad_()
    before = x.detach().clone()
    y = operation(x, group)
    again = operation(x * 2, group)
    weight_seed = 100 if kind_out == "replicated" else 100 + group.rank
    weights = _draw(weight_seed, y.shape[0])
    (weights * (y + again)).sum().backward()
    return y.detach(), x.grad, bool(torch.equal(x.detach(), before)), weights


def _dense(name, t, weights):
    """The same as one program of one process: outputs and input gradients of every rank."""
    _, kind_in, kind_out = OPERATIONS[name]
    sizes, total = SIZES[:t], sum(SIZES[:t])
    if kind_in == "partial":
        inputs = [_draw(rank, total).requires_grad_() for rank in range(t)]
        whole = lambda scale: sum(x * scale for x in inputs)  # noqa: E731
    else:
        inputs = [_draw(0, total).requires_grad_()]
        whole = lambda scale: inputs[0] * scale  # noqa: E731
    outputs = [whole(1).split(sizes)[rank] if kind_out == "rows" else whole(1) for rank in range(t)]
    doubled = [whole(2).split(sizes)[rank] if kind_out == "rows" else whole(2) for rank in range(t)]
    consumers = 1 if kind_out == "replicated" else t
    loss = sum((weights[rank] * (outputs[rank] + doubled[rank])).sum() for rank in range(consumers))
    loss.backward()
    if kind_in == "partial":
        gradients = [x.grad for x in inputs]
    elif kind_in == "rows":
        gradients = list(inputs[0].grad.split(sizes))
    else:
        gradients = [inputs[0].grad] * t
    return [output.detach() for output in outputs], gradients


@pytest.mark.parametrize("t", [1, 2, 3, 4])
@pytest.mark.parametrize("name", OPERATIONS)
def test_outputs_and_gradients_equal_the_dense_program(ranks, name, t):
    outcomes = ranks(t).run(_run, name)
    outputs, gradients = _dense(name, t, [weights for *_, weights in outcomes])
    for rank, (y, gradient, untouched, _) in enumerate(outcomes):
        torch.testing.assert_close(y, outputs[rank], rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(gradient, gradients[rank], rtol=1e-13, atol=1e-13)
        assert untouched


def _gradcheck(group, name):
    """Numerical against analytic: every rank perturbs the same entry of its own input in turn, together."""
    operation, kind_in, kind_out = OPERATIONS[name]
    total = sum(_sizes(group))
    rows = _sizes(group)[group.rank] if kind_in == "rows" else total
    seed = group.rank if kind_in != "replicated" else 0
    x = _draw(seed, rows).requires_grad_()
    y = operation(x, group)
    weights = _draw(100 if kind_out == "replicated" else 100 + group.rank, y.shape[0])
    (weights * y.sin()).sum().backward()

    def loss(local):
        value = (weights * operation(local, group).sin()).sum()
        values = group.communicator.all_gather(value.reshape(1), [1] * group.size)
        return (values[0] if kind_out == "replicated" else values.sum()).item()

    worst, step = 0.0, 1e-5
    with torch.no_grad():
        for owner in range(group.size if kind_in != "replicated" else 1):
            for index in range(max(_sizes(group)) * 5 if kind_in == "rows" else total * 5):
                mine = (kind_in == "replicated" or owner == group.rank) and index < x.numel()
                shift = torch.zeros_like(x)
                if mine:
                    shift.view(-1)[index] = step
                numeric = (loss(x + shift) - loss(x - shift)) / (2 * step)
                if mine:
                    worst = max(worst, abs(numeric - x.grad.reshape(-1)[index].item()))
    return worst


@pytest.mark.parametrize("t", [2, 3, 4])
@pytest.mark.parametrize("name", OPERATIONS)
def test_gradcheck_against_finite_differences(ranks, name, t):
    assert max(ranks(t).run(_gradcheck, name)) < 1e-8


def _last_dim(group):
    x = _draw(group.rank, 4).requires_grad_()
    y = mappings.gather_last_dim_from_region(x, group)
    weights = _draw(9, 4).repeat(1, group.size) * torch.arange(5 * group.size)
    (y * weights).sum().backward()
    return y.detach(), x.grad, weights


@pytest.mark.parametrize("t", [1, 2, 3])
def test_gather_along_the_last_dim(ranks, t):
    for rank, (y, gradient, weights) in enumerate(ranks(t).run(_last_dim)):
        assert torch.equal(y, torch.cat([_draw(r, 4) for r in range(t)], dim=1))
        assert torch.equal(gradient, weights[:, rank * 5 : rank * 5 + 5])
