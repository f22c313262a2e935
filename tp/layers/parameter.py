"""Parameters that describe their parts, and the walk over a module tree that names them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from tp.errors import RequestError
from tp.kernels.int8_weight import Int8Weight
from tp.layers.layout import Layout
from tp.parallel.group import TensorParallelGroup
from tp.parallel.partition import Part


@dataclass(frozen=True)
class SharedSlice:
    """Rows of a parameter of which several ranks compute partial gradients; enumerated alike on every rank.

    Attributes:
        name: of the parameter in its module.
        length: rows along dim 0.
        local_start: where they lie in this rank's parameter; None where this rank does not hold them.
    """

    name: str
    length: int
    local_start: int | None


class ParallelModule(nn.Module):
    """A module that knows, for each of its own parameters, which slices of which Hub tensors it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.parameter_parts: dict[str, tuple[Part, ...]] = {}

    def shared_slices(self, layout: Layout) -> list[SharedSlice]:
        """What of this module's gradients is a partial sum in `layout`, to be summed over the group."""
        return []


@dataclass(frozen=True)
class NamedParameter:
    """One parameter of a model with its parts, their names completed to those of the Hub layout.

    Attributes:
        path: dotted path in the module tree.
        tensor: the local parameter.
        parts: what it holds; padding belongs to no part.
    """

    path: str
    tensor: Tensor
    parts: tuple[Part, ...]

    def slice_of(self, part: Part) -> Tensor:
        """The view of the local parameter that `part` describes."""
        return self.tensor.narrow(part.dim, part.local_start, part.length)


def named_parts(model: nn.Module) -> Iterator[NamedParameter]:
    """Every parameter of `model` once (tied ones at their first place), with completed part names.

    A part named "" takes its module's own path; a part named "k_proj" in module "a.qkv_proj" becomes "a.k_proj".

    Raises:
        RequestError: the model was prepared for inference.
        TypeError: a parameter of a module that is no `ParallelModule`, so nobody knows which slice it is.
    """
    seen: set[int] = set()
    for module_path, module in model.named_modules():
        if isinstance(module, Int8Weight):
            raise RequestError(f"{module_path} is int8, for inference only: load the model again to train or save it")
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if not isinstance(module, ParallelModule):
                raise TypeError(
                    f"parameter {module_path}.{name} belongs to a {type(module).__name__}, not a ParallelModule"
                )
            parent = module_path.rpartition(".")[0]
            parts = []
            for part in module.parameter_parts[name]:
                owner = f"{parent}.{part.name}" if parent and part.name else part.name or module_path
                parts.append(replace(part, name=f"{owner}.{name}"))
            yield NamedParameter(f"{module_path}.{name}", parameter, tuple(parts))


def replicated_parts(size: int, group: TensorParallelGroup) -> tuple[Part, ...]:
    """The one part of a parameter that every rank holds whole; `size` is its length along dim 0."""
    return (Part("", 0, 0, size, 0, size, tuple(range(group.size))),)
