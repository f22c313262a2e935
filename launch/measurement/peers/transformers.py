"""transformers: `generate` on one process, or under torchrun with its own plan of tensor parallelism."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from launch.measurement.child import Command
from launch.measurement.contestants import Contestant
from launch.measurement.peers.environments import interpreter
from launch.measurement.peers.task import Task, arguments_of_module
from launch.measurement.requests import DecodeAnswer, DecodeRequest
from launch.measurement.serving import Line, TokenClock, serve

NAME = "transformers"
MODULE = "launch.measurement.peers.transformers"
PATIENCE = timedelta(days=1)
"""Of collectives: ranks wait for the next request in one, for as long as others are being measured."""


def contestant(task: Task, processes: int, threads: int) -> Contestant:
    """One process, or `tp_plan="auto"` on several."""

    def command() -> Command:
        start = ["-m"]
        if processes > 1:
            start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
        arguments = [interpreter(NAME), *start, MODULE, *task.options(processes, threads)]
        return Command(arguments, {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"})

    return Contestant(NAME, processes, threads, command)


def main() -> None:
    """Serves on this rank. Rank 0 has the line; the others follow it."""
    import torch
    from torch import distributed

    arguments = arguments_of_module()
    line = Line()
    torch.set_num_threads(arguments.threads)
    if arguments.processes > 1:
        distributed.init_process_group("gloo", timeout=PATIENCE)
    if arguments.processes == 1 or distributed.get_rank() == 0:
        serve(line, lambda: _load(arguments))
        _shared(arguments, None)
    else:
        model = _model(arguments)
        while (request := _shared(arguments, None)) is not None:
            _decode(model, request)


def _load(arguments: Namespace) -> tuple[Callable[[DecodeRequest], DecodeAnswer], dict[str, Any]]:
    import transformers

    model = _model(arguments)

    def decode(request: DecodeRequest) -> DecodeAnswer:
        _shared(arguments, request)
        return _decode(model, request)

    return decode, {"version": transformers.__version__}


def _model(arguments: Namespace) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    plan = {"tp_plan": "auto"} if arguments.processes > 1 else {}
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype), **plan)
    model.generation_config = GenerationConfig()  # greedy, without the checkpoint's penalties and end ids
    return model.eval()


def _shared(arguments: Namespace, request: DecodeRequest | None) -> DecodeRequest | None:
    """Rank 0's request, on every rank; None: there is no other."""
    if arguments.processes == 1:
        return request
    from torch import distributed

    held = [request]
    distributed.broadcast_object_list(held, src=0)
    return held[0]


def _decode(model: Any, request: DecodeRequest) -> DecodeAnswer:
    import torch
    from transformers import StoppingCriteriaList

    ids = torch.tensor(request.prompt_ids)
    clock = TokenClock(request.batch)

    def note(input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        clock.tokens()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    result = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=request.new_tokens,
        stopping_criteria=StoppingCriteriaList([note]),
    )
    return clock.answer(result[:, ids.shape[1] :].tolist())


if __name__ == "__main__":
    main()
