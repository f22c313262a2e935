"""Float32 parameters, lower-precision compute: every module casts its own parameters where it uses them.

The cast is part of the graph: gradients flow in the compute dtype up to it and reach the parameter in float32, where
they accumulate, are clipped and reduced. The parameters are their own master weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tp.layers.parameter import ParallelModule


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """From now on `model` computes in `dtype`, its parameters staying as they are.

    Each module's call sees casts of its parameters in their place; w ↦ round(w), dw = float32(dround(w)).
    """
    caster = _Caster(dtype)
    for module in model.modules():
        if isinstance(module, ParallelModule):
            module.register_forward_pre_hook(caster.enter)
            module.register_forward_hook(caster.leave, always_call=True)


class _Caster:
    """Hooks around a module's forward: casts found before the registered parameters, which stay where they are."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.shadowed: dict[int, dict[str, Any]] = {}

    def enter(self, module: nn.Module, arguments: Any) -> None:
        names = [name for name, parameter in module._parameters.items() if parameter is not None]
        self.shadowed[id(module)] = {name: module.__dict__.get(name) for name in names}
        for name in names:
            module.__dict__[name] = getattr(module, name).to(self.dtype)

    def leave(self, module: nn.Module, arguments: Any, result: Any) -> None:
        for name, before in self.shadowed.pop(id(module), {}).items():
            if before is None:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = before
