"""Collectives of one group, behind one interface, counted and timed.

`OrderedCommunicator` owns its sums: it exchanges the addends and adds them in rank order in float32, so
that replicas are bitwise equal and an all-reduce equals a reduce-scatter followed by an all-gather.
`NativeCommunicator` leaves the sum to the backend (NCCL).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tp.errors import CommunicationError
from tp.parallel.announced_exchange import exchange
from tp.parallel.native_collectives import Counts
from tp.parallel.partition import chunk_ranges

R = TypeVar("R")

ONE_SHOT_BYTES = 64 * 1024
"""Up to this size an all-reduce exchanges whole addends (one step); above, chunks (two steps)."""
MOST_CUDA_EVENTS = 4096
"""Pairs of events that wait to be summed up; the older half of so many has long ended."""

# As torch 2.13 calls them, where the names that older ones know warn every user.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CommunicationStatistics:
    """What a communicator has done since the last `reset`.

    Attributes:
        calls: collectives entered.
        bytes: bytes of the tensors that this rank handed in (all_reduce, reduce_scatter, broadcast) or
            got back (all_gather).
        seconds: time inside collectives on this rank, waiting for peers included. On CUDA it is the time
            between events around the collective on its stream. Asking for it waits for the collectives begun so far.

    A collective that a CUDA graph captures is counted there once, and not timed; replays are not seen.

    Args:
        counts: where C++ code counts, which then does what `add` does elsewhere.
    """

    def __init__(self, counts: Counts | None = None) -> None:
        self._counts = counts or Counts()
        self._cuda_events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def calls(self) -> int:
        return self._counts.calls

    @property
    def bytes(self) -> int:
        return self._counts.bytes

    @property
    def seconds(self) -> float:
        self._sum_up(len(self._cuda_events))
        return self._counts.seconds

    def add(self, nbytes: int, seconds: float) -> None:
        """Counts a collective."""
        self._counts.calls += 1
        self._counts.bytes += nbytes
        self._counts.seconds += seconds

    def add_cuda_events(self, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Adds the time between two events, once they have happened."""
        self._cuda_events.append((start, end))
        if len(self._cuda_events) == MOST_CUDA_EVENTS:
            self._sum_up(MOST_CUDA_EVENTS // 2)

    def reset(self) -> None:
        self._counts.calls = self._counts.bytes = 0
        self._counts.seconds = 0.0
        self._cuda_events.clear()

    def _sum_up(self, count: int) -> None:
        for start, end in self._cuda_events[:count]:
            end.synchronize()
            self._counts.seconds += start.elapsed_time(end) / 1e3
        del self._cuda_events[:count]


class Communicator(ABC):
    """Collectives over the ranks of one group. Inputs may be strided and are never changed.

    Attributes:
        rank: this rank's index within the group.
        size: how many ranks it has.
        global_ranks: their numbers in the run, by which users know them.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.global_ranks: Sequence[int] = range(size)
        self.statistics = CommunicationStatistics()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks of equally shaped tensors; the result has the tensor's dtype."""
        return self.run_collective(tensor.nbytes, tensor, self._all_reduce)

    def all_gather(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        """Concatenation, in rank order along dim 0, of every rank's tensor.

        Args:
            tensor: [sizes[rank], ...], the other dimensions equal on all ranks.
            sizes: rows of every rank; may be uneven and contain zeros.
        """
        self._check_rows(tensor.shape[0], sizes[self.rank], "all_gather")
        nbytes = sum(sizes) * tensor.shape[1:].numel() * tensor.element_size()
        return self.run_collective(nbytes, tensor, self._all_gather, sizes)

    def all_gather_stacked(self, tensor: Tensor) -> Tensor:
        """[size, *shape]: every rank's tensor, in rank order; all have this one's shape."""
        return self.all_gather(tensor.unsqueeze(0), [1] * self.size)

    def reduce_scatter(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        """Sum over ranks of [sum(sizes), ...], of which this rank keeps its sizes[rank] rows."""
        self._check_rows(tensor.shape[0], sum(sizes), "reduce_scatter")
        return self.run_collective(tensor.nbytes, tensor, self._reduce_scatter, sizes)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """The tensor of rank `source`; on the other ranks `tensor` gives shape, dtype and device."""
        return self.run_collective(tensor.nbytes, tensor, self._broadcast, source)

    def run_collective(self, nbytes: int, tensor: Tensor, collective: Callable[..., R], *arguments: Any) -> R:
        """`collective(tensor, *arguments)`, counted. Every collective goes through here: what wraps it sees them all.

        Args:
            nbytes: what `CommunicationStatistics` counts.
            collective: the method that carries it out; its name, but for underscores, says what it is.
        """
        if tensor.is_cuda:
            return self._timed_by_events(nbytes, tensor, collective, *arguments)
        began = time.perf_counter()
        result = collective(tensor, *arguments)
        self.statistics.add(nbytes, time.perf_counter() - began)
        return result

    def check_usable(self) -> None:  # noqa: B027  most have nothing that could refuse
        """What replays captured collectives asks first.

        Raises:
            CommunicationError: closed, of another process, or after an error.
        """

    def complete(self, begin: Callable[..., int], *arguments: Any) -> None:
        """Calls a function of the C++ library, and sees the collective that it began to its end.

        Args:
            begin: gives the status that the collective came back with: 0 where it is finished, or there was none.
            arguments: of the function; what they point to must live until then.

        Raises:
            CommunicationError: a peer is lost, or in another collective; or this communicator has none in C++.
        """
        if status := begin(*arguments):
            raise CommunicationError(f"a collective came back with status {status}, which nobody here began")

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's (picklable) value, in rank order. For set-up and errors, not for steps."""

    def close(self) -> None:  # noqa: B027  most have nothing to give back
        """Gives back what the communicator holds; no collective can be asked of it afterwards."""

    @abstractmethod
    def _all_reduce(self, tensor: Tensor) -> Tensor: ...

    @abstractmethod
    def _all_gather(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor: ...

    @abstractmethod
    def _reduce_scatter(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor: ...

    @abstractmethod
    def _broadcast(self, tensor: Tensor, source: int) -> Tensor: ...

    def _check_rows(self, rows: int, expected: int, operation: str) -> None:
        if rows != expected:
            raise CommunicationError(f"{operation} on rank {self.rank}: tensor has {rows} rows, sizes say {expected}")

    def _timed_by_events(self, nbytes: int, tensor: Tensor, collective: Callable[..., R], *arguments: Any) -> R:
        self.statistics.add(nbytes, 0.0)
        if is_being_captured(tensor):
            return collective(tensor, *arguments)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = collective(tensor, *arguments)
        end.record()
        self.statistics.add_cuda_events(start, end)
        return result


class AloneCommunicator(Communicator):
    """The group of one rank: every collective is the identity, and nothing is counted."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def run_collective(self, nbytes: int, tensor: Tensor, collective: Callable[..., R], *arguments: Any) -> R:
        return collective(tensor, *arguments)

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def _all_gather(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        return tensor

    def _reduce_scatter(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        return tensor

    def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return tensor


class ProcessGroupCommunicator(Communicator):
    """What the communicators over a torch process group have in common."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(dist.get_rank(process_group), dist.get_world_size(process_group))
        self.process_group = process_group
        self.global_ranks = dist.get_process_group_ranks(process_group)

    def all_gather_object(self, value: Any) -> list[Any]:
        return gather_objects(self.process_group, value)

    def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        result = tensor.clone(memory_format=torch.contiguous_format)
        dist.broadcast(result, group=self.process_group, group_src=source)
        return result


class OrderedCommunicator(ProcessGroupCommunicator):
    """Collectives over gloo: an exchange of addends, then sums in rank order with float32 accumulation.

    gloo adds bfloat16 in bfloat16 and in an order of its own; its all-to-all is also its fastest collective.
    CUDA tensors pass through host memory, so several ranks may share one GPU.

    Ranks whose collectives do not match are told so, see `tp.parallel.announced_exchange`.
    """

    def all_gather_object(self, value: Any) -> list[Any]:
        self._exchange("all_gather_object", [torch.empty(0, device="cpu")] * self.size, [0] * self.size)
        return super().all_gather_object(value)

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        announced = f"all_reduce of {_described(tensor.shape, tensor.dtype)}"
        if tensor.nbytes <= ONE_SHOT_BYTES:
            addends = self._exchange(announced, [tensor.unsqueeze(0)] * self.size, [1] * self.size)
            return sum_in_rank_order([addend[0] for addend in addends])
        sizes = [len(chunk) for chunk in chunk_ranges(tensor.numel(), self.size)]
        reduced = self._sum_of_rows(announced, tensor.reshape(-1), sizes)
        return self._all_gather(reduced, sizes).view(tensor.shape)

    def _all_gather(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        announced = f"all_gather of {_described(torch.Size([sum(sizes), *tensor.shape[1:]]), tensor.dtype)}, {sizes}"
        return torch.cat(self._exchange(announced, [tensor] * self.size, sizes))

    def _reduce_scatter(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        announced = f"reduce_scatter of {_described(tensor.shape, tensor.dtype)}, {sizes}"
        return self._sum_of_rows(announced, tensor, sizes)

    def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        announced = f"broadcast from rank {source} of {_described(tensor.shape, tensor.dtype)}"
        whole = tensor.unsqueeze(0)
        outgoing = [whole if self.rank == source else whole[:0]] * self.size
        received = self._exchange(announced, outgoing, [int(rank == source) for rank in range(self.size)])
        return received[source][0].clone()

    def _sum_of_rows(self, announced: str, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        """This rank's rows of the sum."""
        rows = sizes[self.rank]
        return sum_in_rank_order(self._exchange(announced, tensor.split(list(sizes)), [rows] * self.size))

    def _exchange(self, announced: str, outgoing: Sequence[Tensor], receive: Sequence[int]) -> list[Tensor]:
        device = outgoing[0].device
        distinct = {id(rows): rows for rows in outgoing}  # often the same rows for all
        on_host = {key: rows.cpu() for key, rows in distinct.items()}
        staged = [on_host[id(rows)] for rows in outgoing]
        return [rows.to(device) for rows in exchange(self.process_group, announced, staged, receive)]


def _described(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


class NativeCommunicator(ProcessGroupCommunicator):
    """Collectives of the backend itself (NCCL); it chooses the order and precision of its sums."""

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        result = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, group=self.process_group)
        return result

    def _all_gather(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        longest = max(sizes)
        padded = pad_rows(tensor, longest)
        gathered = padded.new_empty((self.size * longest, *tensor.shape[1:]))
        _all_gather_single(gathered, padded, group=self.process_group)
        if min(sizes) == longest:
            return gathered
        return torch.cat([block[:rows] for block, rows in zip(gathered.split(longest), sizes, strict=True)])

    def _reduce_scatter(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        longest = max(sizes)
        if min(sizes) == longest:
            padded = tensor.contiguous()
        else:
            padded = torch.cat([pad_rows(block, longest) for block in tensor.split(list(sizes))])
        reduced = padded.new_empty((longest, *tensor.shape[1:]))
        _reduce_scatter_single(reduced, padded, group=self.process_group)
        return reduced[: sizes[self.rank]]


def gather_objects(process_group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Every rank's (picklable) value, in rank order."""
    values: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(values, value, group=process_group)
    return values


def is_being_captured(tensor: Tensor) -> bool:
    """Whether what is done with the tensor goes into a CUDA graph, where events have no times."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def sum_in_rank_order(addends: Sequence[Tensor]) -> Tensor:
    """((a_0 + a_1) + a_2) + …, accumulated in float32 (float64 stays float64), rounded once to their dtype."""
    first = addends[0]
    floating = first.is_floating_point() and first.dtype != torch.float64
    total = first.to(torch.float32, copy=True) if floating else first.clone()
    for addend in addends[1:]:
        total += addend.to(total.dtype)  # torch adds no float8 to it
    return total.to(first.dtype)


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """The tensor, contiguous, with zeros after it up to so many rows."""
    if tensor.shape[0] == rows:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_zeros((rows - tensor.shape[0], *tensor.shape[1:]))])
