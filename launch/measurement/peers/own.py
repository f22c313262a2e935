"""This project's engine, as its users run it: `tp.load` and `generate_stream`, ranks started by `launch run`."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from launch.measurement.child import Command
from launch.measurement.contestants import Contestant
from launch.measurement.peers.task import Task, arguments_of_module
from launch.measurement.requests import DecodeAnswer, DecodeRequest
from launch.measurement.serving import Line, TokenClock, serve

if TYPE_CHECKING:
    from tp.generation import LanguageModel
    from tp.parallel.group import TensorParallelGroup

NAME = "own"
PATIENCE_S = 86400.0
"""Of collectives: ranks wait for the next request in one, for as long as others are being measured."""
MODULE = "launch.measurement.peers.own"


def contestant(task: Task, processes: int, threads: int) -> Contestant:
    """The engine on so many ranks."""

    def command() -> Command:
        options = task.options(processes, threads)
        start = ["-m", "launch", "run", "--nproc", str(processes), "-m"] if processes > 1 else ["-m"]
        return Command([sys.executable, *start, MODULE, *options], {"OMP_NUM_THREADS": str(threads)})

    return Contestant(NAME, processes, threads, command)


def main() -> None:
    """Serves on this rank. Rank 0 has the line; the others follow it."""
    from tp.parallel.group import TensorParallelGroup

    arguments = arguments_of_module()
    line = Line()
    group = TensorParallelGroup.from_environment(device="cpu", timeout_s=PATIENCE_S)
    if group.rank == 0:
        serve(line, lambda: _load(arguments, group))
        _go_on(group, False)
    else:
        model = _model(arguments, group)
        while _go_on(group, False):
            _decode(model, None)
    group.close()


def _load(
    arguments: Namespace, group: TensorParallelGroup
) -> tuple[Callable[[DecodeRequest], DecodeAnswer], dict[str, Any]]:
    model = _model(arguments, group)

    def decode(request: DecodeRequest) -> DecodeAnswer:
        _go_on(group, True)
        answer = _decode(model, request)
        assert answer is not None
        return answer

    return decode, {}


def _model(arguments: Namespace, group: TensorParallelGroup) -> LanguageModel:
    import tp

    return tp.load(arguments.model, group, arguments.dtype)


def _go_on(group: TensorParallelGroup, wanted: bool) -> bool:
    """Whether rank 0 has another request."""
    return bool(group.communicator.all_gather_object(wanted)[0])


def _decode(model: LanguageModel, request: DecodeRequest | None) -> DecodeAnswer | None:
    from tp.generation import GenerationOptions

    if request is None:
        for _ in model.generate_stream(None):
            pass
        return None
    options = GenerationOptions(max_new_tokens=request.new_tokens, ignore_eos=True)
    clock = TokenClock(request.batch)
    stream = model.generate_stream([list(ids) for ids in request.prompt_ids], options)
    for event in stream:
        clock.token(event.index)
    return clock.answer([sequence.new_ids for sequence in stream.result().sequences])


if __name__ == "__main__":
    main()
