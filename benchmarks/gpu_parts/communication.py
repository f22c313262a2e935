"""Sums through symmetric memory between two ranks, which share the one GPU: for their values, never for their times.

torch lets ranks share a GPU where TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES is 1; gloo sets the group up. In a dry run
the ranks are on the CPU, and what they share is files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bounds import ulps
from torch import Tensor

from benchmarks.gpu_parts.kernel_values import norm_weight, normal
from benchmarks.gpu_parts.machine import Machine
from benchmarks.gpu_parts.record import Record, require
from tp.kernels.reduce_add_rms_norm import plain_add_rms_norm, reduce_add_rms_norm, reduce_scatter_add_rms_norm
from tp.parallel import symmetric_memory
from tp.parallel.communicator import sum_in_rank_order
from tp.parallel.symmetric_memory import SymmetricMemoryCommunicator, one_shot_sum, two_shot_sum

RANKS = 2
EPS = 1e-5
DIRECTORY_VARIABLE, RANK_VARIABLE = "GPU_CHECK_DIRECTORY", "GPU_CHECK_RANK"
Sums = tuple[Tensor, ...]
Case = Callable[["Rank", torch.dtype], tuple[Sums, Sums]]


def run(record: Record, machine: Machine) -> None:
    """In the first process, starts the ranks; in a rank, checks its share."""
    if RANK_VARIABLE in os.environ:
        rank = None
        with record.attempt(f"rank {os.environ[RANK_VARIABLE]} reads its peer"):
            rank = Rank(machine)
        if rank is None:
            sys.exit(1)
        check(record, machine, rank)
        return
    command = [sys.executable, sys.argv[0], "--parts", "communication", "--record", str(record.path)]
    if not machine.compiles:
        command.append("--cpu")
    with record.attempt("both ranks come to their end"), tempfile.TemporaryDirectory() as directory:
        ranks = [
            subprocess.Popen(
                command,
                env=os.environ
                | {DIRECTORY_VARIABLE: directory, RANK_VARIABLE: str(rank)}
                | {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(RANKS)
        ]
        statuses = [rank.wait() for rank in ranks]
        require(statuses == [0] * RANKS, f"the ranks ended with {statuses}")


class Rank:
    """A rank's communicator, and numbers of which every rank can draw everyone's."""

    def __init__(self, machine: Machine) -> None:
        directory, self.rank = Path(os.environ[DIRECTORY_VARIABLE]), int(os.environ[RANK_VARIABLE])
        self._store = dist.FileStore(str(directory / "store"), RANKS)
        self._exchanges = 0
        dist.init_process_group("gloo", store=self._store, rank=self.rank, world_size=RANKS)
        self.process_group = dist.group.WORLD
        assert self.process_group is not None
        self.device = machine.device
        self.communicator = self._communicator(machine)

    def _communicator(self, machine: Machine) -> SymmetricMemoryCommunicator:
        assert self.process_group is not None
        if not machine.compiles:
            from host_symmetric_memory import played_symmetric_memory

            return played_symmetric_memory(self.process_group, 1 << 16)
        buffers = symmetric_memory._shared_buffers(self.process_group, self.device, self.rank)
        failure = symmetric_memory._failure_of_a_trial(buffers, self.device)
        require(failure is None, str(failure))
        return SymmetricMemoryCommunicator(self.process_group, buffers)

    def addends(self, dtype: torch.dtype, rows: int) -> list[Tensor]:
        """[rows, 96] of every rank; the same list on all of them."""
        torch.manual_seed(rows)
        return [normal(self.device, dtype, rows, 96) for _ in range(RANKS)]

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's. Through the store: torch's own exchange of objects needs numpy, which need not be there."""
        self._exchanges += 1
        self._store.set(f"{self._exchanges} of {self.rank}", json.dumps(value))
        return [json.loads(self._store.get(f"{self._exchanges} of {rank}")) for rank in range(RANKS)]


@torch.no_grad()
def check(record: Record, machine: Machine, rank: Rank) -> None:
    """Every form in every dtype, three times in a row; rank 0 records what both found."""
    for case in (plain_one_shot, plain_two_shot, one_shot, two_shot, scattered):
        for dtype in machine.checked:
            outcomes = rank.gathered([outcome(rank, case, dtype) for _ in range(3)])
            if rank.rank == 0:
                with record.attempt(f"{case.__name__} {dtype}") as found:
                    found["outcomes"] = outcomes
                    wrong = [each for of_rank in outcomes for each in of_rank if "failure" in each]
                    require(not wrong, str(wrong[:1]))
    if machine.compiles:
        outcomes = rank.gathered(replays(rank))
        if rank.rank == 0:
            with record.attempt("an odd number of sums in a CUDA graph, replayed") as found:
                require(outcomes == [""] * RANKS, str(outcomes))
        outcomes = rank.gathered(overlapped_products(rank))
        if rank.rank == 0:
            with record.attempt("matmuls that overlap with their transfers") as found:
                require(outcomes == [""] * RANKS, str(outcomes))
    rank.communicator.close()
    dist.destroy_process_group()


def outcome(rank: Rank, case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Whether the sum is the ordered one bit for bit, how far the norm is from the plain one, or what was raised."""
    try:
        results, expected = case(rank, dtype)
        found: dict[str, Any] = {"norm_ulps": ulps(results[1], expected[1]) if len(results) > 1 else 0.0}
        if not torch.equal(results[0], expected[0]):
            found["failure"] = f"{int((results[0] != expected[0]).sum())} elements of the sum differ"
        elif found["norm_ulps"] > (8 if dtype == torch.float32 else 2):
            found["failure"] = "the norm is too far from the plain one"
        return found
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}"}


def plain_one_shot(rank: Rank, dtype: torch.dtype) -> tuple[Sums, Sums]:
    addends = rank.addends(dtype, 7)
    return (rank.communicator.with_addends(addends[rank.rank], one_shot_sum),), (sum_in_rank_order(addends),)


def plain_two_shot(rank: Rank, dtype: torch.dtype) -> tuple[Sums, Sums]:
    addends = rank.addends(dtype, 7)
    return (rank.communicator.with_addends(addends[rank.rank], two_shot_sum),), (sum_in_rank_order(addends),)


def _operands(rank: Rank, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Sums]:
    addends = rank.addends(dtype, 7)
    residual = normal(rank.device, dtype, 7, 96)
    bias, weight = (norm_weight(rank.device, dtype, 96) for _ in range(2))
    expected = plain_add_rms_norm(sum_in_rank_order(addends), bias, residual, weight, EPS)
    return addends, bias, residual, weight, expected


def one_shot(rank: Rank, dtype: torch.dtype) -> tuple[Sums, Sums]:
    addends, bias, residual, weight, expected = _operands(rank, dtype)
    return reduce_add_rms_norm(rank.communicator, addends[rank.rank], bias, residual, weight, EPS), expected


def two_shot(rank: Rank, dtype: torch.dtype) -> tuple[Sums, Sums]:
    from tp.kernels.triton.symmetric_memory import two_shot as in_two_shots

    addends, bias, residual, weight, expected = _operands(rank, dtype)
    result = rank.communicator.with_addends(
        addends[rank.rank], lambda handed: in_two_shots(handed, bias, residual, weight, EPS)
    )
    return result, expected


def scattered(rank: Rank, dtype: torch.dtype) -> tuple[Sums, Sums]:
    addends, bias, residual, weight, expected = _operands(rank, dtype)
    rows = slice(0, 4) if rank.rank == 0 else slice(4, 7)
    result = reduce_scatter_add_rms_norm(
        rank.communicator, addends[rank.rank], bias, residual[rows], weight, EPS, [4, 3]
    )
    return result, tuple(part[rows] for part in expected)


def replays(rank: Rank) -> str:
    """Three sums are captured; each replay must sum what is in the tensors then. Gives what went wrong, or ""."""
    x = rank.addends(torch.float32, 7)[rank.rank]
    residual, weight = torch.zeros_like(x), torch.ones(96, device=rank.device)

    def sums() -> Tensor:
        state = x
        for _ in range(3):
            state, _ = reduce_add_rms_norm(rank.communicator, state, None, residual, weight, EPS)
        return state

    try:
        sums()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = sums()
        for number in range(5):
            addends = rank.addends(torch.float32, 7 + number)
            x.copy_(addends[rank.rank][:7])
            graph.replay()
            expected = sum_in_rank_order([addend[:7] for addend in addends]) * RANKS**2
            if not torch.equal(captured, expected):
                return f"replay {number} gave other sums"
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def overlapped_products(rank: Rank) -> str:
    """An all-gather with its matmul, and a matmul with its reduce-scatter, against one after the other; or ""."""
    addends = rank.addends(torch.bfloat16, 7)
    matrix = normal(rank.device, torch.bfloat16, 96, 64)
    sizes, rows = [4, 3], (slice(0, 4), slice(4, 7))[rank.rank]
    try:
        whole, product = rank.communicator.all_gather_matmul(addends[0][rows], matrix, sizes)
        if not torch.equal(whole, addends[0]):
            return "the gathered rows are others"
        summed = rank.communicator.matmul_reduce_scatter(addends[rank.rank], matrix, sizes)
        expected = (addends[0] @ matrix, sum_in_rank_order([addend @ matrix for addend in addends])[rows])
        for name, result, wanted in zip(("gathered", "scattered"), (product, summed), expected, strict=True):
            if (result.float() - wanted.float()).abs().max() > 2**-6 * wanted.float().abs().max():
                return f"the {name} product is too far from the plain one"
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
