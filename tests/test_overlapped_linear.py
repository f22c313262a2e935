"""Linears that overlap with their transfers: the values and gradients of those that do not, padding and all.

What multiplies while rows are on their way needs GPUs; here gloo stands in for torch's two operations.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from tiny_models import hub_config, parallel_model, transformers_model

from tp.kernels import overlapped_linear
from tp.layers import ShardTokens
from tp.layers.parameter import named_parts
from tp.parallel import TensorParallelGroup, symmetric_memory
from tp.parallel.communicator import OrderedCommunicator, ProcessGroupCommunicator
from tp.parallel.symmetric_memory import SymmetricMemoryCommunicator


class PlayedCommunicator(OrderedCommunicator, SymmetricMemoryCommunicator):
    """Takes itself for one over symmetric memory; its collectives are gloo's."""

    overlaps = True

    def __init__(self, process_group):
        ProcessGroupCommunicator.__init__(self, process_group)
        self._capacity = -1
        self.called = []

    def gathered_product(self, x, matrices, dim, name):
        assert dim == 0 and name == self.process_group.group_name
        self.called.append("all_gather")
        whole = self._all_gather(x, [len(x)] * self.size)
        return whole, [whole @ matrix for matrix in matrices]

    def scattered_product(self, x, matrix, operation, dim, name):
        assert (operation, dim, name) == ("sum", 0, self.process_group.group_name)
        self.called.append("reduce_scatter")
        assert len(x) % self.size == 0
        return self._reduce_scatter(x @ matrix, [len(x) // self.size] * self.size)


@contextmanager
def overlapping(communicator):
    """From one row on, and with the communicator's operations for torch's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlapped_linear, "LEAST_ROWS", 1)
        patch.setattr(symmetric_memory, "fused_all_gather_matmul", communicator.gathered_product)
        patch.setattr(symmetric_memory, "fused_matmul_reduce_scatter", communicator.scattered_product)
        yield


def _logits_and_gradients(group, config, weights, ids):
    model = parallel_model(config, weights, group)
    model.model.choose_layout = ShardTokens
    with torch.no_grad():
        inferred = model(ids)
    logits = model(ids)
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return inferred, logits.detach(), {p.path: p.tensor.grad for p in named_parts(model)}


def _with_and_without(group, config, weights, ids):
    results, work = [], []
    played = TensorParallelGroup(PlayedCommunicator(group.process_group))
    plain = TensorParallelGroup(OrderedCommunicator(group.process_group))
    for used in (plain, played):
        with overlapping(played.communicator):
            results.append(_logits_and_gradients(used, config, weights, ids))
        work.append((used.communicator.statistics.calls, used.communicator.statistics.bytes))
    return *results, *work


@pytest.mark.parametrize("family, tokens, t", [("llama", 7, 3), ("qwen2", 4, 3), ("llama", 9, 2)])
def test_values_and_gradients_are_those_of_one_after_the_other(ranks, family, tokens, t):
    """Of 4 tokens on 3 ranks the last has none, and of 7 one: both are padded on their way."""
    ids = torch.randint(0, 80, (1, tokens), generator=torch.Generator().manual_seed(3))
    outcomes = ranks(t).run(_with_and_without, hub_config(family), transformers_model(family).state_dict(), ids)
    for plain, overlapped, plain_work, overlapped_work in outcomes:
        for expected, actual in zip(plain[:2], overlapped[:2], strict=True):
            assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
        for path, expected in plain[2].items():
            assert (overlapped[2][path] - expected).abs().max() <= 2e-5 * expected.abs().max(), path
        assert overlapped_work == plain_work


def _operations(group):
    communicator = PlayedCommunicator(group.process_group)
    config = hub_config("llama")
    with overlapping(communicator):
        model = parallel_model(config, transformers_model("llama").state_dict(), TensorParallelGroup(communicator))
        model.model.choose_layout = ShardTokens
        model(torch.tensor([[3, 1, 4, 1, 5]])).sum().backward()
    return config["num_hidden_layers"], communicator.called


def test_every_linear_of_a_layer_overlaps_forward_and_backward(ranks):
    """Forward: q|k|v, gate|up and the LM head gather, o and down scatter. Backward: each the other way."""
    for layers, called in ranks(2).run(_operations):
        assert called.count("all_gather") == called.count("reduce_scatter") == 4 * layers + 1


def test_torch_has_the_two_operations_with_these_arguments():
    from torch.distributed import _symmetric_memory  # noqa: F401

    gather = torch.ops.symm_mem.fused_all_gather_matmul.default._schema
    scatter = torch.ops.symm_mem.fused_matmul_reduce_scatter.default._schema
    names = [
        [argument.name for argument in schema.arguments if not argument.kwarg_only] for schema in (gather, scatter)
    ]
    assert names[0] == ["A", "Bs", "gather_dim", "group_name"]
    assert names[1] == ["A", "B", "reduce_op", "scatter_dim", "group_name"]


def _choices(group):
    sizes = [1024, 1024]
    played = PlayedCommunicator(group.process_group)
    x = torch.ones(1024, 2)
    return [
        overlapped_linear.overlaps(played, x, sizes),
        overlapped_linear.overlaps(played, x, [1024, 1023]),
        overlapped_linear.overlaps(played, x.double(), sizes),
        overlapped_linear.overlaps(group.communicator, x, sizes),
    ]


def test_what_overlaps(ranks):
    """Many rows, of a dtype that torch's operations take, between GPUs that read each other's memory."""
    assert ranks(2).run(_choices) == [[True, False, False, False]] * 2
