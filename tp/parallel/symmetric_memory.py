"""Collectives of GPUs of one host that read each other's memory, over torch's symmetric memory: small sums faster.

The sums are those of `OrderedCommunicator`, bit for bit: in rank order, accumulated in float32, rounded once; where a
tensor is too large, NCCL's. `symmetric_or_nccl` needs GPUs that can read each other's memory; the buffers and sums are
plain torch, and are tested on memory that processes share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tp.choice import enabled, warn_once
from tp.errors import first_line
from tp.parallel.agreement import first_refusal
from tp.parallel.communicator import NativeCommunicator, is_being_captured, pad_rows, sum_in_rank_order
from tp.parallel.hosts import gpu_id, this_host
from tp.parallel.partition import chunk_ranges
from tp.parallel.timeouts import timeout_of

R = TypeVar("R")

NAME = "symmetric_memory"
"""For `tp.choice`."""
ONE_SHOT_BYTES = 256 * 1024
"""Up to this size each rank reads whole addends (one wait); above, chunks, and then the others' sums (two waits).
Between two ranks both read as much, so that one wait is always the better."""
LARGEST_BYTES = 4 * 1024 * 1024
"""What a buffer holds; NCCL's bandwidth wins above."""
ALIGNMENT_BYTES = 256
PLACES = 4
"""Buffers of a rank: two in turn for what runs, two for what is captured in CUDA graphs."""


class Addends:
    """A tensor of every rank in memory that all ranks read, until the second hand-over from now.

    Attributes:
        rank: this one.
        addresses: [t] int64 on the device: where each rank's begins, aligned to `ALIGNMENT_BYTES`.
        of_ranks: the tensors in rank order, this rank's included.
        wait: for all ranks to come here, on the current stream.
    """

    def __init__(self, of_ranks: Sequence[Tensor], rank: int, addresses: Tensor, wait: Callable[[], None]) -> None:
        self.of_ranks = of_ranks
        self.rank = rank
        self.addresses = addresses
        self.wait = wait

    @property
    def own(self) -> Tensor:
        """This rank's."""
        return self.of_ranks[self.rank]


class SymmetricBuffers:
    """Buffers on every rank of a group that every rank reads.

    A hand-over waits once, for all ranks' tensors to be there. It does not wait for the peers to have read them: the
    next one uses the other buffer, and the one after it comes after the next's wait, which no rank passes before all
    have finished this one. So all hand-overs of a group are on one stream, or on streams that wait for each other.

    What a CUDA graph captures uses buffers of its own, since its replays are not seen here, and begins with a wait for
    the graphs before it. Between the captures of two graphs there must be a hand-over that is not captured: the
    warm-up that captures need anyway.

    Args:
        of_ranks: each rank's memory as this rank sees it, [bytes] uint8.
        rank: this one.
        wait: for all ranks, on the current stream.
    """

    def __init__(self, of_ranks: Sequence[Tensor], rank: int, wait: Callable[[], None]) -> None:
        self.capacity = of_ranks[0].numel() // PLACES // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.rank = rank
        self._of_ranks = of_ranks
        self._wait = wait
        starts = [memory.data_ptr() for memory in of_ranks]
        self.device = of_ranks[rank].device
        self._addresses = [
            torch.tensor([start + place * self.capacity for start in starts], device=self.device)
            for place in range(PLACES)
        ]
        self._last_place = {False: 1, True: 3}
        self._captured_last = False

    def hand_over(self, tensor: Tensor) -> Addends:
        """Everyone's tensors, of one shape and dtype and up to `capacity` bytes; this rank gives `tensor`."""
        captured = is_being_captured(tensor)
        if captured and not self._captured_last:
            self._wait()
        self._captured_last = captured
        place = self._last_place[captured] = self._last_place[captured] ^ 1
        start = place * self.capacity
        of_ranks = [
            memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape) for memory in self._of_ranks
        ]
        of_ranks[self.rank].copy_(tensor)
        self._wait()
        return Addends(of_ranks, self.rank, self._addresses[place], self._wait)


class SymmetricMemoryCommunicator(NativeCommunicator):
    """NCCL's collectives, but all-reduces of small and middle sizes through symmetric memory."""

    def __init__(self, process_group: dist.ProcessGroup, buffers: SymmetricBuffers) -> None:
        super().__init__(process_group)
        self._buffers: SymmetricBuffers | None = buffers
        self._capacity = buffers.capacity

    def close(self) -> None:
        self._buffers, self._capacity = None, -1

    def takes(self, tensor: Tensor) -> bool:
        """Whether `with_addends` takes the tensor; alike on all ranks that are given like ones."""
        return tensor.is_floating_point() and 0 < tensor.nbytes <= self._capacity

    def in_one_shot(self, tensor: Tensor) -> bool:
        """Whether each rank had better read all addends of such a tensor, instead of sharing the sums out."""
        return self.size == 2 or tensor.nbytes <= ONE_SHOT_BYTES

    def with_addends(self, tensor: Tensor, finish: Callable[[Addends], R]) -> R:
        """What `finish` makes of every rank's tensor; one collective, counted as an all-reduce.

        Args:
            tensor: this rank's, one that `takes`.
        """
        result: R = self.run_collective(tensor.nbytes, tensor, self._with_addends, finish)
        return result

    @property
    def overlaps(self) -> bool:
        """Whether the two methods below can be called: the memory that ranks read of each other is that of GPUs."""
        return self._buffers is not None and self._buffers.device.type == "cuda"

    def all_gather_matmul(self, x: Tensor, matrix: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Every rank's rows, and they times `matrix`, computed while they come; one collective, an all-gather.

        Args:
            x: [sizes[rank], K], this rank's rows; no rank has more than the first.
            matrix: [K, M].
        """
        self._check_rows(x.shape[0], sizes[self.rank], "all_gather_matmul")
        nbytes = sum(sizes) * x.shape[1] * x.element_size()
        return self.run_collective(nbytes, x, self._all_gather_matmul, matrix, sizes)

    def matmul_reduce_scatter(self, x: Tensor, matrix: Tensor, sizes: Sequence[int]) -> Tensor:
        """This rank's rows of Σ_ranks x · matrix, sent while the others are computed; one collective, a reduce-scatter.

        Each rank's product is rounded to its dtype, and the sum is rounded once, as where one follows the other.

        Args:
            x: [sum(sizes), K]. matrix: [K, M].
        """
        self._check_rows(x.shape[0], sum(sizes), "matmul_reduce_scatter")
        nbytes = x.shape[0] * matrix.shape[1] * x.element_size()
        return self.run_collective(nbytes, x, self._matmul_reduce_scatter, matrix, sizes)

    def _all_gather_matmul(self, x: Tensor, matrix: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        padded = pad_rows(x, sizes[0])
        whole, (product,) = fused_all_gather_matmul(padded, [matrix], 0, self.process_group.group_name)
        return whole[: sum(sizes)], product[: sum(sizes)]  # only the last ranks have fewer rows: padding is at the end

    def _matmul_reduce_scatter(self, x: Tensor, matrix: Tensor, sizes: Sequence[int]) -> Tensor:
        padded = pad_rows(x, sizes[0] * self.size)
        summed = fused_matmul_reduce_scatter(padded, matrix, "sum", 0, self.process_group.group_name)
        return summed[: sizes[self.rank]]

    def _with_addends(self, tensor: Tensor, finish: Callable[[Addends], R]) -> R:
        assert self._buffers is not None
        return finish(self._buffers.hand_over(tensor))

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        if not self.takes(tensor):
            return super()._all_reduce(tensor)
        return self._with_addends(tensor, one_shot_sum if self.in_one_shot(tensor) else two_shot_sum)


def fused_all_gather_matmul(*arguments: Any) -> tuple[Tensor, list[Tensor]]:
    """torch's operation of this name, which begins to exist with the import."""
    import torch.distributed._symmetric_memory

    result: tuple[Tensor, list[Tensor]] = torch.ops.symm_mem.fused_all_gather_matmul(*arguments)
    return result


def fused_matmul_reduce_scatter(*arguments: Any) -> Tensor:
    """torch's operation of this name, which begins to exist with the import."""
    import torch.distributed._symmetric_memory

    result: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(*arguments)
    return result


def one_shot_sum(addends: Addends) -> Tensor:
    """The sum over ranks, from everyone's whole tensors."""
    return sum_in_rank_order(addends.of_ranks)


def two_shot_sum(addends: Addends) -> Tensor:
    """The same, of which each rank sums a chunk over its own addends, for all to read."""
    flat = [addend.view(-1) for addend in addends.of_ranks]
    chunks = [slice(chunk.start, chunk.stop) for chunk in chunk_ranges(flat[0].numel(), len(flat))]
    own = chunks[addends.rank]
    flat[addends.rank][own] = sum_in_rank_order([addend[own] for addend in flat])
    addends.wait()
    return torch.cat([sums[chunk] for sums, chunk in zip(flat, chunks, strict=True)]).view(addends.own.shape)


def symmetric_or_nccl(process_group: dist.ProcessGroup, device: torch.device | str) -> NativeCommunicator:
    """Collectives of an NCCL group: with symmetric memory where every GPU can read every other's, else NCCL alone.

    To be called by all members of the group at the same time. Needs GPUs that can read each other's memory, to give
    anything but NCCL; on rank 0 a warning tells why it does not, unless the ranks are on several hosts.

    Args:
        device: this rank's GPU.
    """
    nccl = NativeCommunicator(process_group)
    if nccl.size == 1:
        return nccl
    device = torch.empty(0, device=device).device  # with its index, where it was not given
    places: list[_Place] = nccl.all_gather_object(_Place.of(device))
    refusal = first_refusal(nccl.all_gather_object(_refusal(places, nccl.rank, device)))
    buffers = None
    if refusal is None:
        try:
            buffers, failure = _shared_buffers(process_group, device, nccl.rank), None
        except RuntimeError as error:
            failure = first_line(error)
        refusal = first_refusal(nccl.all_gather_object(failure))
    if refusal is None and buffers is not None:
        refusal = first_refusal(nccl.all_gather_object(_failure_of_a_trial(buffers, device)))
    if refusal is None and buffers is not None:
        return SymmetricMemoryCommunicator(process_group, buffers)
    if refusal and nccl.rank == 0:
        warn_once(NAME, f"NCCL makes all sums: {refusal}")
    return nccl


class _Place(NamedTuple):
    """Where a rank computes, and whether it was told not to share."""

    host: str
    gpu: str
    switched_off: bool

    @classmethod
    def of(cls, device: torch.device) -> _Place:
        return cls(this_host(), gpu_id(device), not enabled(NAME))


def _refusal(places: Sequence[_Place], rank: int, device: torch.device) -> str | None:
    """Why this rank cannot read the others' memory; "" where nobody need be told; None if it can."""
    if any(place.switched_off for place in places) or len({place.host for place in places}) > 1:
        return ""
    visible = {gpu_id(index): index for index in range(torch.cuda.device_count())}
    for peer, place in enumerate(places):
        index = visible.get(place.gpu)
        if index is None:
            return f"the GPU of rank {peer} is not visible to rank {rank}"
        if index != visible[places[rank].gpu] and not torch.cuda.can_device_access_peer(device, index):
            return f"the GPU of rank {rank} cannot read the memory of rank {peer}'s"
    return None


def _shared_buffers(process_group: dist.ProcessGroup, device: torch.device, rank: int) -> SymmetricBuffers:
    from torch.distributed import _symmetric_memory as symmetric_memory

    nbytes = PLACES * LARGEST_BYTES
    memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    handle: Any = symmetric_memory.rendezvous(memory, process_group)
    of_ranks = [
        memory if peer == rank else handle.get_buffer(peer, (nbytes,), torch.uint8)
        for peer in range(handle.world_size)
    ]  # fmt: skip
    timeout_ms = int(timeout_of(process_group, device).total_seconds() * 1e3)
    return SymmetricBuffers(of_ranks, rank, partial(handle.barrier, 0, timeout_ms))


def _failure_of_a_trial(buffers: SymmetricBuffers, device: torch.device) -> str | None:
    """Whether every rank's number arrives, in each of the buffers that run."""
    for _ in range(PLACES // 2):
        seen = [int(addend) for addend in buffers.hand_over(torch.tensor(buffers.rank, device=device)).of_ranks]
        if seen != list(range(len(seen))):
            return f"a trial on rank {buffers.rank} read {seen} for the numbers of the ranks"
    return None
