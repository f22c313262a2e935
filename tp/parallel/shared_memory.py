"""Collectives between ranks of one host through memory that they share: microseconds instead of gloo's milliseconds.

The sums are those of `OrderedCommunicator`, bit for bit: in rank order, accumulated in float32, rounded once.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tp.errors import CommunicationError, LostPeerError
from tp.native.operands import address, contiguous, weight_for
from tp.parallel.agreement import different_collectives
from tp.parallel.communicator import (
    CommunicationStatistics,
    OrderedCommunicator,
    ProcessGroupCommunicator,
    sum_in_rank_order,
)
from tp.parallel.native_collectives import BUSY, MISMATCH, OTHER_DTYPE, WAITING, announcement
from tp.parallel.shared_segment import RankSeen, SharedSegment, share_memory
from tp.parallel.timeouts import timeout_of

R = TypeVar("R")

SLOT_BYTES = 256 * 1024
"""What a rank hands over in one round. Larger tensors take several."""
NORMED = (torch.float32, torch.bfloat16)
"""Dtypes of the collectives that end in a norm."""


def host_or_gloo(
    process_group: dist.ProcessGroup, timeout_s: float | None = None, slot_bytes: int = SLOT_BYTES
) -> ProcessGroupCommunicator:
    """Collectives of a gloo group on the CPU: through shared memory where all ranks can, else over gloo.

    To be called by all members of the group at the same time.

    Args:
        timeout_s: how long a collective waits for a peer; by default as long as the process group does.
        slot_bytes: see `SLOT_BYTES`; equal on all ranks.
    """
    over_gloo = OrderedCommunicator(process_group)
    if over_gloo.size == 1:
        return over_gloo
    segment = share_memory(over_gloo.all_gather_object, over_gloo.rank, over_gloo.size, slot_bytes)
    if segment is None:
        return over_gloo
    return SharedMemoryCommunicator(process_group, segment, timeout_s or timeout_of(process_group).total_seconds())


class SharedMemoryCommunicator(ProcessGroupCommunicator):
    """The collectives of one rank; one at a time, and the same ones in the same order on every rank.

    Collectives that do not match, and peers that have ended or do not come, are typed errors. After any error the
    ranks may be out of step, and the communicator refuses further use.

    The sum of a dtype that the C++ code cannot add is an all_gather, and counted as one.
    """

    def __init__(self, process_group: dist.ProcessGroup, segment: SharedSegment, timeout_s: float) -> None:
        super().__init__(process_group)
        self.statistics = CommunicationStatistics(segment.counts)
        self.timeout_s = timeout_s
        self._segment = segment
        self._native = segment.native
        self._refusal = ""
        self._waiting = ""
        _living.add(self)

    def close(self) -> None:
        self._refuse("the group was closed")
        self._segment.close()

    def forget(self) -> None:
        """In a forked child, which has no part in its parent's groups."""
        self._refuse("the group belongs to the process that this one was forked from")
        self._segment.forget()

    def run_collective(self, nbytes: int, tensor: Tensor, collective: Callable[..., R], *arguments: Any) -> R:
        """`collective(tensor, *arguments)`; the C++ library counts and times it."""
        return collective(tensor, *arguments)

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        own = self._own(tensor)
        shape = own.shape
        announced = announcement("all_reduce", own.dtype, shape, shape)
        if announced.dtype == OTHER_DTYPE:
            addends = self._all_gather(own.unsqueeze(0), [1] * self.size)
            return sum_in_rank_order(addends.unbind(0))
        to = torch.empty_like(own)
        self.complete(self._native.all_reduce, self._segment.endpoint, announced, own.data_ptr(), to.data_ptr())
        return to

    def _reduce_scatter(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        own = self._own(tensor)
        announced = announcement("reduce_scatter", own.dtype, own.shape, (own.shape, *sizes))
        if announced.dtype == OTHER_DTYPE:
            parts: Sequence[Tensor] = self._all_reduce(own).split(list(sizes))
            return parts[self.rank].clone()
        to = own.new_empty((sizes[self.rank], *own.shape[1:]))
        lengths = _multiples(tuple(sizes), own.shape[1:].numel())
        self.complete(
            self._native.reduce_scatter, self._segment.endpoint, announced, own.data_ptr(), to.data_ptr(), lengths
        )
        return to

    def _all_gather(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        own = self._own(tensor)
        to = own.new_empty((sum(sizes), *own.shape[1:]))
        announced = announcement("all_gather", own.dtype, to.shape, (to.shape, *sizes))
        lengths = _multiples(tuple(sizes), own.shape[1:].numel() * own.element_size())
        self.complete(
            self._native.all_gather, self._segment.endpoint, announced, own.data_ptr(), to.data_ptr(), lengths
        )
        return to

    def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        if not 0 <= source < self.size:
            raise CommunicationError(f"broadcast from rank {source}: the group has ranks 0 to {self.size - 1}")
        own = self._own(tensor)
        to = torch.empty_like(own)
        announced = announcement("broadcast", own.dtype, own.shape, source)
        self.complete(self._native.broadcast, self._segment.endpoint, announced, own.data_ptr(), to.data_ptr())
        return to

    def supports_add_rms_norm(
        self, partial: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor, rows: int
    ) -> bool:
        """Whether the two collectives below take these operands; alike on all ranks that are given like ones.

        Args:
            rows: of the residual, and of the results.
        """
        if partial.dtype not in NORMED or not partial.is_cpu or partial.dim() != 2 or not partial.shape[1]:
            return False
        columns = partial.shape[1:]
        if columns[0] * partial.element_size() * self.size > self._segment.slot_bytes:
            return False
        return (
            weight.shape == columns
            and (bias is None or (bias.shape == columns and bias.dtype == partial.dtype))
            and (residual is None or (residual.shape == (rows, *columns) and residual.dtype == partial.dtype))
        )

    def reduce_add_rms_norm(
        self, partial: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """All-reduce, + bias, + residual, RMSNorm as one collective; see `tp.kernels.reduce_add_rms_norm`.

        Args:
            partial: [N, D], this rank's addend; `supports_add_rms_norm` with rows N.
            bias: [D]. residual: [N, D]. weight: [D].
        """
        return self.run_collective(partial.nbytes, partial, self._reduce_add_rms_norm, bias, residual, weight, eps)

    def reduce_scatter_add_rms_norm(
        self,
        partial: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        sizes: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """The same of this rank's rows only: sizes[rank] of the sum(sizes) rows of `partial`.

        Args:
            residual: [sizes[rank], D]; `supports_add_rms_norm` with as many rows.
        """
        self._check_rows(partial.shape[0], sum(sizes), "reduce_scatter_add_rms_norm")
        scattered = self._reduce_scatter_add_rms_norm
        return self.run_collective(partial.nbytes, partial, scattered, bias, residual, weight, eps, sizes)

    def _reduce_add_rms_norm(
        self, partial: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        own, bias, base = self._own(partial), contiguous(bias), contiguous(residual)
        weight = weight_for(own, weight)
        state, normed = torch.empty_like(own), torch.empty_like(own)
        announced = announcement("reduce_add_rms_norm", own.dtype, own.shape, own.shape[1])
        self.complete(
            self._native.reduce_add_rms_norm, self._segment.endpoint, announced,
            own.data_ptr(), address(bias), address(base), weight.data_ptr(), eps,
            state.data_ptr(), normed.data_ptr(),
        )  # fmt: skip
        return state, normed

    def _reduce_scatter_add_rms_norm(
        self,
        partial: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        sizes: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        own, bias, base = self._own(partial), contiguous(bias), contiguous(residual)
        weight = weight_for(own, weight)
        state = own.new_empty((sizes[self.rank], own.shape[1]))
        normed = torch.empty_like(state)
        announced = announcement("reduce_scatter_add_rms_norm", own.dtype, own.shape, (own.shape, *sizes))
        self.complete(
            self._native.reduce_scatter_add_rms_norm, self._segment.endpoint, announced,
            own.data_ptr(), address(bias), address(base), weight.data_ptr(), eps,
            state.data_ptr(), normed.data_ptr(), _multiples(tuple(sizes), 1), own.shape[1],
        )  # fmt: skip
        return state, normed

    def check_usable(self) -> None:
        if reason := self._refusal or self._waiting:
            raise CommunicationError(reason)

    def _own(self, tensor: Tensor) -> Tensor:
        """This rank's operand, its elements in memory one after the other.

        Raises:
            CommunicationError: refused, or a tensor elsewhere.
        """
        self.check_usable()
        if not tensor.is_cpu:
            raise CommunicationError(f"a collective of CPU ranks was given a tensor on {tensor.device}")
        if tensor.is_complex() or tensor.is_neg():  # torch may have put off a change of sign
            tensor = tensor.resolve_conj().resolve_neg()
        return tensor.contiguous()

    def complete(self, begin: Callable[..., int], *arguments: Any) -> None:
        self.check_usable()  # again: since the arguments were made, a handler may have closed the group
        rank = self.global_ranks[self.rank]
        try:
            status = begin(*arguments)  # a handler of a signal may raise as early as here
            if status == WAITING:
                status = self._wait(rank)
            if status == MISMATCH:
                raise different_collectives(self.global_ranks, [str(rank.announced) for rank in self._everyone()])
        except BaseException as error:
            self._segment.give_up()
            what = str(error) or type(error).__name__
            self._refuse(f"the group cannot be used any more, since on rank {rank}: {what}")
            raise
        if status == BUSY:
            raise CommunicationError(f"rank {rank}: another thread is in a collective of the same group")

    def _wait(self, rank: int) -> int:
        """Goes on with a collective whose peers are late. In between, Python runs the handlers of signals."""
        self._waiting = f"rank {rank} is still waiting for its peers in another collective"
        status, last_round, since = WAITING, -1, 0.0
        while status == WAITING:
            if self._segment.round != last_round:
                last_round, since = self._segment.round, time.monotonic()
            self._look_for_lost_peers(time.monotonic() - since)
            status = self._native.resume(self._segment.endpoint)
        self._waiting = ""
        return status

    def _refuse(self, reason: str) -> None:
        self._refusal = reason

    def _everyone(self) -> list[RankSeen]:
        """By their ranks in the run, by which users know them."""
        seen = zip(self.global_ranks, self._segment.everyone(), strict=True)
        return [replace(member, rank=rank) for rank, member in seen]

    def _look_for_lost_peers(self, waited_s: float) -> None:
        seen = self._everyone()
        missing = [rank for rank in seen if rank.published < self._segment.round]
        where = f"{seen[self.rank].announced} on rank {seen[self.rank].rank}"
        if ended := [rank for rank in missing if rank.is_open and not rank.alive]:
            raise LostPeerError(f"{_listed(ended)} ended during {where}")
        if closed := [rank for rank in missing if rank.closed]:
            raise LostPeerError(f"{_listed(closed)} closed the group before {where}")
        if gave_up := [rank for rank in missing if not rank.is_open]:
            raise LostPeerError(f"{_listed(gave_up)} gave the group up after an error, before {where}")
        if missing and waited_s > self.timeout_s:
            raise LostPeerError(f"{_listed(missing)} did not enter {where} within {self.timeout_s:g} s: stuck, or at "
                                "other work; a longer timeout_s waits longer")  # fmt: skip


_living: weakref.WeakSet[SharedMemoryCommunicator] = weakref.WeakSet()


def _forget_all() -> None:
    for communicator in list(_living):
        communicator.forget()


os.register_at_fork(after_in_child=_forget_all)


@functools.cache  # kept: a captured step goes on using their addresses
def _multiples(sizes: tuple[int, ...], unit: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(sizes))(*(size * unit for size in sizes))


def _listed(ranks: list[RankSeen]) -> str:
    return " and ".join(map(str, ranks))
