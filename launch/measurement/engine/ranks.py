"""Ranks that serve as one contestant: rank 0 has the line, and every rank carries out what comes on it."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from launch.measurement.serving import Line, serve_lines

if TYPE_CHECKING:
    from tp.parallel.group import TensorParallelGroup

PATIENCE_S = 86400.0
"""Of collectives: ranks wait for the next request in one, for as long as others are being measured."""


def serve_on_ranks(
    arguments: Namespace, load: Callable[[Namespace, TensorParallelGroup], Callable[[str], Any]]
) -> None:
    """Serves on this rank until there are no more requests.

    Args:
        arguments: of the module, see `launch.measurement.peers.task`.
        load: gives what carries out the text of a request; called, and its result, on every rank.
    """
    from tp.parallel.group import TensorParallelGroup

    line = Line()
    device, backend = (None if value == "auto" else value for value in (arguments.device, arguments.backend))
    group = TensorParallelGroup.from_environment(backend, device, timeout_s=PATIENCE_S)
    waiting = _on_the_cpu(group)
    if group.rank == 0:
        serve_lines(line, lambda: _loaded(arguments, group, waiting, load))
        _shared(waiting, None)
    else:
        carry_out = load(arguments, group)
        while (text := _shared(waiting, None)) is not None:
            carry_out(text)
    waiting.close()
    group.close()


def _on_the_cpu(group: TensorParallelGroup) -> TensorParallelGroup:
    """The same ranks, which do not keep their GPUs busy while they wait, as they would in NCCL."""
    import torch.distributed as dist

    from tp.parallel.group import TensorParallelGroup

    if group.size == 1 or group.device.type == "cpu":
        return group
    over_gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_S))
    return TensorParallelGroup.from_process_group(over_gloo, "cpu")


def _loaded(
    arguments: Namespace,
    group: TensorParallelGroup,
    waiting: TensorParallelGroup,
    load: Callable[[Namespace, TensorParallelGroup], Any],
) -> tuple[Callable[[str], Any], dict[str, Any]]:
    import torch

    carry_out = load(arguments, group)

    def answer(text: str) -> Any:
        return carry_out(_shared(waiting, text))

    return answer, {"ranks": group.size, "threads": torch.get_num_threads(), "pid": os.getpid()}


def _shared(waiting: TensorParallelGroup, text: str | None) -> str | None:
    """Rank 0's request, on every rank; None: there is no other."""
    shared: str | None = waiting.communicator.all_gather_object(text)[0]
    return shared
