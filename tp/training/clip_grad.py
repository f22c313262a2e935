"""The norm of a gradient that is split over the group, every parameter element counted once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tp.kernels.statistics import statistics_dtype
from tp.layers.parameter import named_parts
from tp.parallel.group import TensorParallelGroup


@torch.no_grad()
def grad_norm(model: nn.Module, group: TensorParallelGroup) -> Tensor:
    """√Σ g² over all elements of all parameters, a float64 scalar, equal on all ranks.

    What several ranks hold (norms, shared KV heads) is counted by the lowest of them, tied parameters once, padding
    never. Nothing larger than a parameter's own slice is made.
    """
    total = torch.zeros((), dtype=torch.float64, device=group.device)
    for parameter in named_parts(model):
        if parameter.tensor.grad is None:
            continue
        for part in parameter.parts:
            if part.sharers[0] == group.rank:
                gradient = parameter.tensor.grad.narrow(part.dim, part.local_start, part.length)
                norm = torch.linalg.vector_norm(gradient, dtype=statistics_dtype(gradient.dtype))
                total += norm.double().square()
    return group.communicator.all_reduce(total).sqrt()


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, group: TensorParallelGroup) -> Tensor:
    """Scales all gradients in place so that their global norm is at most `max_norm`; returns the norm before."""
    norm = grad_norm(model, group)
    if norm > max_norm:
        for parameter in named_parts(model):
            if parameter.tensor.grad is not None:
                parameter.tensor.grad.mul_((max_norm / norm).to(parameter.tensor.grad.dtype))
    return norm
