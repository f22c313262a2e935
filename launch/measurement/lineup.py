"""Who takes part: this project at each degree, and the systems that it is compared with in the forms they have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from launch.measurement.contestants import Contestant
from launch.measurement.peers import llama_cpp, own, transformers, vllm
from launch.measurement.peers.task import Task
from tp.errors import RequestError

PEERS: dict[str, Callable[[Task, int, int], Contestant]] = {
    transformers.NAME: transformers.contestant,
    vllm.NAME: vllm.contestant,
    llama_cpp.NAME: llama_cpp.contestant,
}
"""By name, what makes a contestant of (task, processes, threads of each)."""


def lineup(task: Task, degrees: Sequence[int], peers: Sequence[str], total_threads: int) -> list[Contestant]:
    """All contestants, this project's first; all compute with the same number of threads in all.

    Args:
        degrees: of tensor parallelism. llama.cpp, which has none over processes, takes part once.
        peers: names from `PEERS`.
        total_threads: dealt out to the processes of a contestant, at least one each.

    Raises:
        RequestError: a peer that there is not.
    """
    if unknown := [name for name in peers if name not in PEERS]:
        raise RequestError(f"--compare {','.join(unknown)}: there are {', '.join(PEERS)}")
    chosen = [own.contestant(task, degree, _share(total_threads, degree)) for degree in degrees]
    for name in peers:
        forms = [1] if name == llama_cpp.NAME else degrees
        chosen += [PEERS[name](task, degree, _share(total_threads, degree)) for degree in forms]
    return chosen


def _share(total_threads: int, processes: int) -> int:
    return max(1, total_threads // processes)
