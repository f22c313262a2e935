"""This project's engine, as its users run it: `tp.load` and `generate_stream`, ranks started by `launch run`."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from launch.measurement.child import Command
from launch.measurement.contestants import Contestant
from launch.measurement.engine.ranks import serve_on_ranks
from launch.measurement.engine.requests import RateRequest, TraceRequest, request_of_line
from launch.measurement.peers.task import Task, arguments_of_module
from launch.measurement.requests import DecodeRequest

if TYPE_CHECKING:
    from tp.parallel.group import TensorParallelGroup

NAME = "own"
MODULE = "launch.measurement.peers.own"


def contestant(task: Task, processes: int, threads: int, module: str = MODULE) -> Contestant:
    """The engine on so many ranks.

    Args:
        module: what runs on each rank.
    """

    def command() -> Command:
        options = task.options(processes, threads)
        start = ["-m", "launch", "run", "--nproc", str(processes), "-m"] if processes > 1 else ["-m"]
        return Command([sys.executable, *start, module, *options], {"OMP_NUM_THREADS": str(threads)})

    return Contestant(NAME, processes, threads, command)


def main() -> None:
    """Serves on this rank."""
    serve_on_ranks(arguments_of_module(), _load)


def _load(arguments: Namespace, group: TensorParallelGroup) -> Callable[[str], Any]:
    from launch.measurement.engine.model import load_model
    from launch.measurement.engine.rates import Rates
    from launch.measurement.engine.serving import decode
    from launch.measurement.engine.trace import trace_serving

    model = load_model(arguments.model, arguments.dtype, group)
    rates = Rates(group, model.dtype)

    def carry_out(text: str) -> Any:
        request = request_of_line(text)
        if isinstance(request, RateRequest):
            return rates.measure(request)
        if isinstance(request, TraceRequest):
            return trace_serving(model, request)
        assert isinstance(request, DecodeRequest)
        return decode(model, request).fields()

    return carry_out


if __name__ == "__main__":
    main()
