"""`train`: pre-trains or fine-tunes a model on text, tensor parallel inside and data parallel outside."""

from __future__ import annotations

import argparse
from typing import Any

from launch.arguments import (
    add_layout_option,
    add_output_options,
    add_rank_options,
    check_ranks,
    place,
    positive,
    seconds,
)
from launch.rank_process import is_rank, rank_terminal, world_size
from launch.terminal import Terminal
from launch.training_check import check
from launch.training_recipe import COMPUTE_DTYPES, add_recipe_options
from tp.errors import RequestError

DESCRIPTION = "Trains a model on text or JSONL files: from a checkpoint, or from nothing with a configuration."


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser("train", help="pre-train or fine-tune a model", description=DESCRIPTION)
    model = parser.add_argument_group("model")
    model.add_argument("--model", help="to fine-tune: a directory in the Hub's layout, a Hub id, or a .gguf file")
    model.add_argument("--config", type=place, metavar="PATH", help="to train from nothing: a config.json")
    model.add_argument("--tokenizer", metavar="DIR", help="with --config: a directory that holds a tokenizer")
    model.add_argument("--train-tokenizer", type=positive, metavar="V", help="with --config: make one of V tokens")
    model.add_argument(
        "--dtype", choices=COMPUTE_DTYPES, help="of the computation (default: bfloat16 on GPUs, else float32)"
    )
    _add_data_options(parser.add_argument_group("data"))
    add_recipe_options(parser)
    _add_run_options(parser.add_argument_group("run"))
    add_rank_options(parser)
    parser.add_argument("--dp", type=positive, default=1, metavar="D", help="replicas; --tp times --dp ranks in all")
    add_layout_option(parser)
    parser.add_argument("--activation-checkpointing", action="store_true", help="compute layers anew in the backward")
    add_output_options(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Trains: in this process where it is a rank or where one is enough, else on ranks that it starts."""
    check_ranks(arguments)
    arguments.tp = _tp_size(arguments)
    if is_rank():
        _run(arguments, rank_terminal(arguments.debug))
        return 0
    check(arguments)
    num_ranks = arguments.tp * arguments.dp
    if num_ranks > 1:
        return _execute_on_ranks(num_ranks, arguments)
    with Terminal.of_command(json=arguments.json) as terminal:
        _run(arguments, terminal)
    return 0


def _tp_size(arguments: argparse.Namespace) -> int:
    """--tp; else what the ranks, or the GPUs of all machines, leave to each of --dp replicas."""
    given: int | None = arguments.tp
    replicas: int = arguments.dp
    if is_rank():
        if world_size() % replicas or given not in (None, world_size() // replicas):
            asked = f"--dp {replicas}" if given is None else f"--tp {given} times --dp {replicas}"
            raise RequestError(f"{asked} contradicts the launcher, which started {world_size()} ranks")
        return world_size() // replicas
    if given is not None:
        return given
    if arguments.device == "cpu":
        return 1
    import torch

    nodes: int = arguments.nnodes
    return max(1, nodes * torch.cuda.device_count() // replicas)


def _execute_on_ranks(num_ranks: int, arguments: argparse.Namespace) -> int:
    from launch.ranks import Placement, own_command, start

    if num_ranks % arguments.nnodes:
        raise RequestError(f"{num_ranks} ranks are no multiple of --nnodes {arguments.nnodes}: they are dealt evenly")
    placement = Placement.of(num_ranks // arguments.nnodes, arguments)
    return start(own_command(arguments.argv), placement, debug=arguments.debug, grace_s=arguments.grace)


def _run(arguments: argparse.Namespace, terminal: Terminal) -> None:
    from launch.training_run import run
    from tp.parallel.group import TensorParallelGroup

    device, backend = (None if value == "auto" else value for value in (arguments.device, arguments.backend))
    world = TensorParallelGroup.from_environment(backend, device, arguments.collective_timeout)
    run(arguments, world, terminal)
    world.close()


def _add_data_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--data", type=place, nargs="+", required=True, metavar="FILE", help=".txt, .md, .jsonl ...")
    group.add_argument("--eval-data", type=place, nargs="+", default=[], metavar="FILE", help="held-out files")
    group.add_argument("--eval-fraction", type=float, metavar="F", help="hold out this part of the documents instead")
    group.add_argument("--data-cache", type=place, metavar="DIR", help="where tokenized files are kept")


def _add_run_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--output", type=place, required=True, metavar="DIR", help="checkpoints, metrics.jsonl, loss.png"
    )
    group.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint of --output")
    group.add_argument("--evaluate-every", type=positive, default=0, metavar="N", help="steps (default: at the end)")
    group.add_argument("--save-every", type=positive, default=0, metavar="N", help="steps (default: at the end)")
    group.add_argument("--keep", type=positive, default=0, metavar="N", help="newest checkpoints (default: all)")
    group.add_argument("--log-every", type=positive, default=1, metavar="N", help="steps a line of metrics.jsonl")
    group.add_argument("--grace", type=seconds, default=30.0, metavar="S", help="seconds to save after SIGTERM (30)")
