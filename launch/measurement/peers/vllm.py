"""vLLM's build for CPUs: its engine, one step at a time, each tensor-parallel worker bound to its cores."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from launch.measurement.child import Command
from launch.measurement.contestants import Contestant
from launch.measurement.errors import ContestantError
from launch.measurement.peers.environments import HOME, interpreter
from launch.measurement.peers.task import Task, arguments_of_module
from launch.measurement.requests import DecodeAnswer, DecodeRequest
from launch.measurement.serving import Line, TokenClock, serve
from tp.cores import own_cores
from tp.defaults import PREFILL_CHUNK

NAME = "vllm"
MODULE = "launch.measurement.peers.vllm"
CACHE_GIB = 1
"""Room of its KV cache for each worker: thousands of tokens of a small model."""


def contestant(task: Task, processes: int, threads: int) -> Contestant:
    """The engine with so many workers."""

    def command() -> Command:
        environment = {
            "VLLM_CPU_OMP_THREADS_BIND": cores_of_workers(sorted(own_cores()), processes, threads),
            "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": None,
            "LD_PRELOAD": openmp_library(),
        }
        return Command([interpreter(NAME), "-m", MODULE, *task.options(processes, threads)], environment)

    return Contestant(NAME, processes, threads, command)


def cores_of_workers(cores: list[int], processes: int, threads: int) -> str:
    """The cores of each worker, as vLLM takes them: `0-1` for one worker, `0|1` for two of one core each.

    Raises:
        ContestantError: fewer cores than that takes.
    """
    if processes * threads > len(cores):
        raise ContestantError(f"{processes} workers with {threads} threads need more than the {len(cores)} cores here")
    dealt = [cores[worker * threads : (worker + 1) * threads] for worker in range(processes)]
    return "|".join(_listed(own) for own in dealt)


def openmp_library() -> str | None:
    """Intel's OpenMP in its environment, which vLLM asks to be loaded first; None where it is not there."""
    library = HOME / NAME / "lib" / "libiomp5.so"
    return str(library) if library.exists() else None


def _listed(cores: list[int]) -> str:
    if len(cores) > 1 and cores[-1] - cores[0] == len(cores) - 1:
        return f"{cores[0]}-{cores[-1]}"
    return ",".join(map(str, cores))


def main() -> None:
    """Serves; the workers are processes that vLLM starts."""
    arguments = arguments_of_module()
    line = Line()
    serve(line, lambda: _load(arguments))


def _load(arguments: Namespace) -> tuple[Callable[[DecodeRequest], DecodeAnswer], dict[str, Any]]:
    import vllm  # type: ignore[import-not-found]

    engine = vllm.LLM(
        arguments.model,
        dtype=arguments.dtype,
        tensor_parallel_size=arguments.processes,
        max_model_len=arguments.most_tokens,
        max_num_seqs=arguments.most_sequences,
        # At its default of 4096 the warm-up can take minutes on a CPU without instructions for bfloat16.
        max_num_batched_tokens=min(PREFILL_CHUNK, arguments.most_sequences * arguments.most_tokens),
        enable_prefix_caching=False,  # the same prompt comes again in every round
        generation_config="vllm",  # without the checkpoint's penalties
        skip_tokenizer_init=True,
    ).llm_engine
    return lambda request: _decode(engine, request), {"version": vllm.__version__}


def _decode(engine: Any, request: DecodeRequest) -> DecodeAnswer:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=request.new_tokens, ignore_eos=True, detokenize=False)
    new_ids: list[list[int]] = [[] for _ in request.prompt_ids]
    clock = TokenClock(request.batch)
    for index, ids in enumerate(request.prompt_ids):
        engine.add_request(str(index), {"prompt_token_ids": list(ids)}, greedy)
    while engine.has_unfinished_requests():
        for output in engine.step():
            index = int(output.request_id.partition("-")[0])
            for token in output.outputs[0].token_ids[len(new_ids[index]) :]:
                new_ids[index].append(token)
                clock.token(index)
    return clock.answer(new_ids)


if __name__ == "__main__":
    main()
