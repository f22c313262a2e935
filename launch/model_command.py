"""What all commands that run a model have in common: checks, then ranks, then the command on each of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launch import inputs
from launch.arguments import check_model, check_ranks
from launch.default_model import fetched_or_embedded, kept_or_embedded
from launch.rank_process import is_rank, own_rank, rank_terminal, world_size
from launch.terminal import Terminal
from tp.errors import RequestError

if TYPE_CHECKING:
    from tp.parallel.group import TensorParallelGroup


@dataclass(frozen=True)
class ModelCommand:
    """What a command adds to `execute`.

    Attributes:
        check: refuses what cannot be served, before any rank starts.
        run: serves it, on every rank.
    """

    check: Callable[[argparse.Namespace], None]
    run: Callable[[argparse.Namespace, TensorParallelGroup, Terminal], None]


def execute(command: ModelCommand, arguments: argparse.Namespace) -> int:
    """Runs the command: in this process where it is a rank or where one is enough, else on ranks that it starts."""
    check_ranks(arguments)
    if arguments.model is None:
        arguments.model = str(kept_or_embedded() if is_rank() else fetched_or_embedded())
        arguments.argv += ["--model", arguments.model]
    if is_rank():
        return _execute_as_rank(command, arguments)
    tp_size = _tp_size(arguments)
    if tp_size % arguments.nnodes:
        raise RequestError(f"--tp {tp_size} is not a multiple of --nnodes {arguments.nnodes}: ranks are dealt evenly")
    inputs.check(arguments)
    check_model(arguments.model, tp_size)
    command.check(arguments)
    if tp_size > 1:
        return _execute_on_ranks(tp_size, arguments)
    with Terminal.of_command(json=arguments.json) as terminal:
        _run(command, arguments, terminal)
    return 0


def _execute_as_rank(command: ModelCommand, arguments: argparse.Namespace) -> int:
    if arguments.tp not in (None, world_size()):
        raise RequestError(f"--tp {arguments.tp} contradicts the launcher, which started {world_size()} ranks")
    if own_rank() == 0:
        inputs.check(arguments)
    command.check(arguments)
    _run(command, arguments, rank_terminal(arguments.debug))
    return 0


def _execute_on_ranks(tp_size: int, arguments: argparse.Namespace) -> int:
    from launch.ranks import Placement, own_command, start

    placement = Placement.of(tp_size // arguments.nnodes, arguments)
    command = own_command(arguments.argv)
    return start(command, placement, debug=arguments.debug, standard_input=arguments.text_read)


def _run(command: ModelCommand, arguments: argparse.Namespace, terminal: Terminal) -> None:
    from tp.parallel.group import TensorParallelGroup

    device, backend = (None if value == "auto" else value for value in (arguments.device, arguments.backend))
    group = TensorParallelGroup.from_environment(backend, device, arguments.collective_timeout)
    command.run(arguments, group, terminal)
    group.close()


def _tp_size(arguments: argparse.Namespace) -> int:
    """--tp, else the GPUs of all machines, else 1."""
    given: int | None = arguments.tp
    if given is not None:
        return given
    import torch

    nodes: int = arguments.nnodes
    return nodes if arguments.device == "cpu" else nodes * max(1, torch.cuda.device_count())
