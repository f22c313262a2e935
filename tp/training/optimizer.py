"""AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101) over a split model, and its state by Hub names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from tp.layers.parameter import NamedParameter, named_parts

MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw(
    model: nn.Module, *, learning_rate: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """Decays matrices only; norm weights and biases are left alone. Padding has zero gradients and stays zero."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=learning_rate, betas=betas, eps=eps)


def optimizer_state(model: nn.Module, optimizer: torch.optim.AdamW) -> Iterator[NamedParameter]:
    """Both moments of every parameter, cut and named as the parameter: "exp_avg.model.norm.weight".

    Moments that do not exist yet (before the first step) are made, as zeros, so that they can be loaded into.
    """
    for parameter in named_parts(model):
        state = optimizer.state[parameter.tensor]
        for moment in MOMENTS:
            if moment not in state:
                state[moment] = torch.zeros_like(parameter.tensor, memory_format=torch.preserve_format)
            parts = tuple(replace(part, name=f"{moment}.{part.name}") for part in parameter.parts)
            yield NamedParameter(f"{moment}.{parameter.path}", state[moment], parts)


def set_step_count(optimizer: torch.optim.AdamW, steps: int) -> None:
    """Tells the optimiser how many steps its moments have seen, for its bias correction."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["step"] = torch.tensor(float(steps), dtype=torch.float32, device="cpu")
