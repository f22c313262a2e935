"""This project's training, as `train` runs it, one optimiser step a request."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from launch.measurement.contestants import Contestant
from launch.measurement.engine.ranks import serve_on_ranks
from launch.measurement.engine.requests import RateRequest, TraceRequest, TrainingRequest, request_of_line
from launch.measurement.peers import own
from launch.measurement.peers.task import Task, arguments_of_module

if TYPE_CHECKING:
    from tp.parallel.group import TensorParallelGroup

MODULE = "launch.measurement.peers.own_training"


def contestant(task: Task, processes: int, threads: int) -> Contestant:
    """The learner on so many ranks."""
    return own.contestant(task, processes, threads, MODULE)


def main() -> None:
    """Serves on this rank."""
    serve_on_ranks(arguments_of_module(), _load)


def _load(arguments: Namespace, group: TensorParallelGroup) -> Callable[[str], Any]:
    from launch.measurement.engine.rates import Rates
    from launch.measurement.engine.trace import trace_training
    from launch.measurement.engine.training import make_training, train
    from tp.generation.loading import as_dtype

    learner = make_training(arguments.model, arguments.dtype, group)
    rates = Rates(group, as_dtype(arguments.dtype))

    def carry_out(text: str) -> Any:
        request = request_of_line(text)
        if isinstance(request, RateRequest):
            return rates.measure(request)
        if isinstance(request, TraceRequest):
            return trace_training(learner, request)
        assert isinstance(request, TrainingRequest)
        return train(learner, request).fields()

    return carry_out


if __name__ == "__main__":
    main()
