"""Named regions in a profiler's trace, by hooks that are there only while it runs.

| region | is |
|---|---|
| embed, qkv, gate_up (or up), lm_head | a module's call |
| norm | `ResidualStream.read`: what is pending combined and added, then normed |
| attention | from the end of qkv to the output projection: rotary, cache, softmax |
| activation | from the end of gate_up to the down projection |
| o_proj, down | `ResidualStream.write` of what attention or the MLP gives, where the product is made |
| reduce, gather, broadcast | a collective, with its name; within a norm, where it ends in one |

In training they are those of the forward; in the backward only the collectives have names of ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.profiler import record_function

from tp.layers.residual_stream import ResidualStream

if TYPE_CHECKING:
    from tp.models import CausalLM

MODULES = {
    "embed_tokens": "embed",
    "qkv_proj": "qkv",
    "gate_up_proj": "gate_up",
    "up_proj": "up",
    "lm_head": "lm_head",
}
"""Regions by the last part of a module's path."""
BETWEEN = {"qkv_proj": ("attention", "o_proj"), "gate_up_proj": ("activation", "down_proj"),
           "up_proj": ("activation", "down_proj")}  # fmt: skip
"""By the module after which it begins: a region, and the module before which it ends."""
WRITES = {"attn_out": "o_proj", "mlp_out": "down"}
"""Regions by the point of the stream that is written; another write is no more than its module's call."""


@contextlib.contextmanager
def named_regions(model: CausalLM) -> Iterator[None]:
    """While entered, everything that the model does is in named regions; before and after, nothing of it is there."""
    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules():
            last = path.rpartition(".")[2]
            if last in MODULES:
                stack.enter_context(_around(module, MODULES[last]))
            for name, child in module.named_children():
                if name in BETWEEN:
                    region, end = BETWEEN[name]
                    stack.enter_context(_between(child, module.get_submodule(end), region))
        stack.enter_context(named_function(ResidualStream, "read", lambda *_: "norm"))
        stack.enter_context(named_function(ResidualStream, "write", lambda _, __, site, *___: WRITES.get(site.point)))
        if model.group.size > 1:
            stack.enter_context(named_function(model.group.communicator, "run_collective", _region_of_collective))
        yield


@contextlib.contextmanager
def named_function(owner: Any, name: str, region: Callable[..., str | None]) -> Iterator[None]:
    """While entered, calls of `owner.name` are in the region that `region` gives for their arguments, if any."""
    function = getattr(owner, name)

    def within(*arguments: Any, **named: Any) -> Any:
        found = region(*arguments)
        with contextlib.nullcontext() if found is None else record_function(found):
            return function(*arguments, **named)

    with _patched(owner, name, within):
        yield


def collective_region(name: str) -> str:
    """The region of a collective that the communicator carries out by the method `name`."""
    operation = name.strip("_")
    if operation.startswith("all_gather"):
        return f"gather: {operation}"
    return operation if operation == "broadcast" else f"reduce: {operation}"


def _region_of_collective(nbytes: int, tensor: Tensor, collective: Callable[..., Any], *arguments: Any) -> str:
    return collective_region(collective.__name__)


@contextlib.contextmanager
def _around(module: nn.Module, region: str) -> Iterator[None]:
    open_regions = _OpenRegions(region)
    hooks = [
        module.register_forward_pre_hook(open_regions.enter),
        module.register_forward_hook(open_regions.leave, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _between(first: nn.Module, second: nn.Module, region: str) -> Iterator[None]:
    open_regions = _OpenRegions(region)
    hooks = [first.register_forward_hook(open_regions.enter), second.register_forward_pre_hook(open_regions.leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _OpenRegions:
    """Hooks that open and close one region at a time."""

    def __init__(self, region: str) -> None:
        self._region = region
        self._open: list[record_function] = []

    def enter(self, *_: Any) -> None:
        entered = record_function(self._region)
        entered.__enter__()
        self._open.append(entered)

    def leave(self, *_: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` replaced; afterwards it is what it was, and where it was."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
