"""Finishing, inside the graph, the gradients of which several ranks compute partial sums.

Norm weights and row-parallel biases under sequence parallelism, per-head norms, and KV heads that live on several
ranks are used by each rank on its own tokens or query heads. Their gradients are summed before they reach the
parameter, so that accumulation, clipping and data-parallel reductions see finished ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tp.layers.layout import Layout
from tp.layers.parameter import ParallelModule, SharedSlice
from tp.parallel.group import TensorParallelGroup

Place = tuple[int, SharedSlice]
"""Which of the tensors handed over a shared slice lies in, and the slice."""


@contextmanager
def finished_gradients(module: nn.Module, layout: Layout) -> Iterator[None]:
    """Within the block, `module` computes with views of its shared parameters whose gradients arrive summed.

    Forward: identity. Backward: one all-reduce of all shared slices of the module, entered by every rank of the
    group, with zeros for what a rank does not hold.
    """
    slices = _shared_slices(module, layout) if torch.is_grad_enabled() else []  # decode must not walk the modules
    if not slices:
        yield
        return
    keys = list(dict.fromkeys((owner, shared.name) for owner, shared in slices))
    places = [(keys.index((owner, shared.name)), shared) for owner, shared in slices]
    parameters = [getattr(owner, name) for owner, name in keys]
    views = _sum_shared_gradients(layout.group, places, parameters)
    try:
        for (owner, name), view in zip(keys, views, strict=True):
            owner.__dict__[name] = view  # found before the registered parameter, which stays where it is
        yield
    finally:
        for owner, name in keys:
            owner.__dict__.pop(name, None)


def _shared_slices(module: nn.Module, layout: Layout) -> list[tuple[ParallelModule, SharedSlice]]:
    owners = [owner for owner in module.modules() if isinstance(owner, ParallelModule)]
    return [(owner, shared) for owner in owners for shared in owner.shared_slices(layout)]


def _sum_shared_gradients(
    group: TensorParallelGroup, places: Sequence[Place], parameters: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    views: tuple[Tensor, ...] = _SumSharedGradients.apply(group, places, *parameters)  # type: ignore[no-untyped-call]
    return views


class _SumSharedGradients(torch.autograd.Function):
    """y_i = x_i; dx_i = dy_i, its shared slices replaced by their sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, group: TensorParallelGroup, places: Sequence[Place], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.places = group, places
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        pieces = [_piece(gradients[index], shared) for index, shared in ctx.places]
        summed = ctx.group.communicator.all_reduce(torch.cat(pieces)).split([piece.numel() for piece in pieces])
        finished = [gradient.clone(memory_format=torch.contiguous_format) for gradient in gradients]
        for (index, shared), total in zip(ctx.places, summed, strict=True):
            if shared.local_start is not None:
                rows = finished[index].narrow(0, shared.local_start, shared.length)
                rows.copy_(total.view_as(rows))
        return None, None, *finished


def _piece(gradient: Tensor, shared: SharedSlice) -> Tensor:
    if shared.local_start is None:
        return gradient.new_zeros(shared.length * gradient.shape[1:].numel())
    return gradient.narrow(0, shared.local_start, shared.length).reshape(-1)
