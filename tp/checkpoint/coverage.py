"""Whether the parts of a model's parameters, over all ranks, are the tensors of a checkpoint: each element, once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from tp.checkpoint.tensor_source import StoredTensor
from tp.errors import CheckpointError
from tp.layers.parameter import NamedParameter, named_parts
from tp.parallel.partition import Part

NAMES_SHOWN = 4


def check_against_file(model: nn.Module, tensors: Mapping[str, StoredTensor]) -> None:
    """Checks this rank's parameters against the tensors that a checkpoint holds. Nothing is read or allocated.

    Raises:
        CheckpointError: a tensor that is absent, has another shape or an element type that cannot be read; parts
            of a parameter that overlap, or rows of one that no part fills although the tensor has more.
    """
    parameters = list(named_parts(model))
    names = {part.name for parameter in parameters for part in parameter.parts}
    if missing := sorted(names - tensors.keys()):
        raise CheckpointError(f"the checkpoint lacks {_listed(missing)}")
    for parameter in parameters:
        for part in parameter.parts:
            _check_shape(parameter, part, tensors[part.name])
        check_filled(parameter)


def check_filled(parameter: NamedParameter) -> None:
    """Checks that the parts of a parameter tile it without overlap.

    Only padding may be left: rows at the tail of a parameter whose last part ends where its Hub tensor ends, or
    of one that has no part at all (a rank past the end of the vocabulary).

    Raises:
        CheckpointError: an overlap, a gap, or a tail that is no padding.
    """
    filled = 0
    dim = parameter.parts[0].dim if parameter.parts else 0
    for part in sorted(parameter.parts, key=lambda part: part.local_start):
        if part.local_start != filled or part.dim != dim:
            raise CheckpointError(
                f"{part.name}: elements {filled} to {part.local_start} of {parameter.path} "
                "are loaded twice or not at all"
            )
        filled += part.length
    size = parameter.tensor.shape[dim]
    complete = not parameter.parts or filled == size
    last = max(parameter.parts, key=lambda part: part.local_start, default=None)
    at_end = last is not None and last.global_start + last.length == last.global_length
    if filled > size or not (complete or at_end):
        raise CheckpointError(f"{parameter.path}: {filled} of its {size} rows are loaded, and the rest is no padding")


def check_over_group(parts_of_ranks: Sequence[Sequence[Part]], tensors: Collection[str]) -> None:
    """Checks that the parts of all ranks hold every element of every tensor, on exactly the ranks they name.

    Args:
        parts_of_ranks: every rank's parts, in rank order.
        tensors: names of the tensors that must be held.

    Raises:
        CheckpointError: a tensor that no parameter takes, or elements of one that no rank or a wrong rank holds.
    """
    held: dict[str, list[tuple[int, Part]]] = defaultdict(list)
    for rank, parts in enumerate(parts_of_ranks):
        for part in parts:
            held[part.name].append((rank, part))
    if unused := sorted(set(tensors) - held.keys()):
        raise CheckpointError(f"the checkpoint holds {_listed(unused)}, which no parameter of the model takes")
    for name, holders in held.items():
        _check_held(name, holders)


@dataclass(frozen=True)
class _Cut:
    dim: int
    global_length: int


def _check_held(name: str, holders: Sequence[tuple[int, Part]]) -> None:
    """Walks a tensor from its beginning; every run of elements must be held by exactly the ranks that share it."""
    cuts = {_Cut(part.dim, part.global_length) for _, part in holders}
    if len(cuts) != 1:
        raise CheckpointError(f"{name} is cut in different ways on different ranks")
    (cut,) = cuts
    ranks_of_run: dict[tuple[int, int, tuple[int, ...]], list[int]] = defaultdict(list)
    for rank, part in holders:
        ranks_of_run[part.global_start, part.length, part.sharers].append(rank)
    position = 0
    for (start, length, sharers), ranks in sorted(ranks_of_run.items()):
        if start != position or tuple(sorted(ranks)) != sharers:
            raise CheckpointError(
                f"{name}: elements {min(start, position)} to {max(start + length, position)} along dim {cut.dim} "
                f"are held by ranks {sorted(ranks)}, not by {list(sharers)} alone"
            )
        position = start + length
    if position != cut.global_length:
        raise CheckpointError(
            f"{name}: elements {position} to {cut.global_length} along dim {cut.dim} are held by no rank"
        )


def _check_shape(parameter: NamedParameter, part: Part, stored: StoredTensor) -> None:
    expected = list(parameter.tensor.shape)
    expected[part.dim] = part.global_length
    if list(stored.shape) != expected:
        raise CheckpointError(
            f"{part.name} is {list(stored.shape)} in the checkpoint, its configuration says {expected}"
        )
    if stored.torch_dtype is None:
        raise CheckpointError(
            f"{part.name} is stored as {stored.dtype}, which is not read: use a checkpoint in float32, bfloat16, "
            "float16 or float64, or a GGUF file in a quantisation that the gguf package decodes"
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
