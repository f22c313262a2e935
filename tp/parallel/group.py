"""The tensor-parallel group: an object that is passed in; nothing here or above asks the world for its size."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from tp import __version__
from tp.choice import disabled
from tp.errors import CommunicationError, TensorParallelError, first_line
from tp.parallel.agreement import compare
from tp.parallel.communicator import (
    AloneCommunicator,
    Communicator,
    OrderedCommunicator,
    gather_objects,
)
from tp.parallel.core_binding import bind_to_own_cores
from tp.parallel.hosts import gpu_id, this_host
from tp.parallel.shared_memory import host_or_gloo
from tp.parallel.symmetric_memory import symmetric_or_nccl

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


class TensorParallelGroup:
    """The ranks that one model is split over, as this rank sees them.

    Attributes:
        rank: this rank's index within the group.
        size: the tensor-parallel degree t.
        device: where this rank's tensors live.
        communicator: the collectives of the group.

    Raises:
        RequestError: TP_DECODER_DISABLE names what is no operation.
    """

    def __init__(self, communicator: Communicator, device: torch.device | str = "cpu") -> None:
        disabled()  # is asked before anything is computed
        self.communicator = communicator
        self._made_world = False
        self.device = torch.device(device)
        if str(self.device) == "cuda" and torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())  # threads and other ranks need its index

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def size(self) -> int:
        return self.communicator.size

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """torch's group of these ranks, for torch's own wrappers; None for a group that is alone."""
        return getattr(self.communicator, "process_group", None)

    def __repr__(self) -> str:
        return f"TensorParallelGroup(rank={self.rank}, size={self.size}, device={str(self.device)!r})"

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> TensorParallelGroup:
        """A group of one rank; needs no process group."""
        return cls(AloneCommunicator(), device)

    @classmethod
    def from_process_group(
        cls, process_group: dist.ProcessGroup, device: torch.device | str | None = None
    ) -> TensorParallelGroup:
        """The group of an existing torch process group, NCCL or gloo.

        Every member calls it, at the same time: CPU ranks of one host arrange for memory that they share.

        Args:
            device: this rank's device; by default the current CUDA device under NCCL, else the CPU.

        Raises:
            CommunicationError: a backend other than NCCL and gloo, a rank outside the process group, or ranks of
                different versions of this package or of torch.
        """
        if dist.get_rank(process_group) < 0:
            raise CommunicationError("this process is not a member of the process group that was given")
        _check_versions(process_group)
        backend = str(dist.get_backend(process_group))
        if backend not in ("nccl", "gloo", "mpi", "ucc"):  # made for several device types: the device decides
            on_cuda = torch.device(device or "cuda").type == "cuda" and torch.cuda.is_available()
            backend = "nccl" if on_cuda else "gloo"
        if backend == "nccl":
            device = device or torch.device("cuda", torch.cuda.current_device())
            return cls(symmetric_or_nccl(process_group, torch.device(device)), device)
        if backend == "gloo":
            on_cpu = torch.device(device or "cpu").type == "cpu"
            over = host_or_gloo if on_cpu else OrderedCommunicator
            return cls(over(process_group), device or "cpu")
        raise CommunicationError(f"backend {backend!r} is not supported: use nccl or gloo")

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, dim: str = "tp") -> TensorParallelGroup:
        """The group along one named dimension of a torch `DeviceMesh`."""
        return cls.from_process_group(mesh.get_group(dim), None if mesh.device_type == "cuda" else mesh.device_type)

    @classmethod
    def from_environment(
        cls, backend: str | None = None, device: str | None = None, timeout_s: float = 60.0
    ) -> TensorParallelGroup:
        """The group of all ranks that a launcher (torchrun) started: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_*.

        Initialises torch.distributed where it is not yet, after binding the device; on CPUs each rank is bound to cores
        of its own, see `tp.parallel.core_binding`. Without those variables, or with WORLD_SIZE=1, the group is `alone`.

        Args:
            backend: "nccl" or "gloo"; by default nccl on CUDA, gloo on CPU.
            device: "cuda" or "cpu"; by default cuda where there is one.
            timeout_s: seconds that a collective waits for a peer.

        Raises:
            CommunicationError: NCCL asked for with fewer GPUs than local ranks, or with two ranks on one, or without
                CUDA, or of a torch without NCCL; variables that are missing or make no sense.
            RequestError: as the class.
        """
        disabled()  # is asked before ranks wait for one another
        device_type = device or ("cuda" if torch.cuda.is_available() else "cpu")
        backend = backend or ("nccl" if device_type == "cuda" else "gloo")
        try:
            bound = _bind_device(device_type, backend)
            if int(os.environ.get("WORLD_SIZE", "1")) == 1:
                return cls.alone(bound)
            makes_world = not dist.is_initialized()
            if makes_world:
                _check_interfaces(backend)
                dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
                if backend == "nccl":
                    store = dist.distributed_c10d._get_default_store()
                    _check_gpus(store, dist.get_rank(), dist.get_world_size(), gpu_id(bound))
        except ValueError as error:
            raise CommunicationError(
                f"the launcher's variables (RANK, WORLD_SIZE, MASTER_ADDR, ...) are not complete: {first_line(error)}; "
                "start with torchrun, or unset WORLD_SIZE"
            ) from error
        world = dist.group.WORLD
        assert world is not None
        group = cls.from_process_group(world, bound)
        group._made_world = makes_world
        if bound.type == "cpu":
            bind_to_own_cores(group.communicator)
        if makes_world and backend == "gloo":
            atexit.register(group._close_at_exit)
        return group

    def close(self) -> None:
        """Ends the group, and torch's groups where `from_environment` made them; nothing may be asked of it then."""
        self.communicator.close()
        self.communicator = AloneCommunicator()
        if self._made_world and dist.is_initialized():
            dist.destroy_process_group()

    def _close_at_exit(self) -> None:
        """The interpreter's end would abort the process now and then while threads of gloo run.

        After an error it is left alone: they may wait for peers.
        """
        if getattr(sys, "last_value", None) is None:
            self.close()

    def agree(self, action: Callable[[], T]) -> T:
        """Runs `action` on every rank; a typed error on any is raised on all (the lowest such rank's error).

        So a bad file or a full disk that one rank sees is everyone's error, and nobody waits for a peer that gave up.
        """
        result: T | None = None
        error: TensorParallelError | None = None
        try:
            result = action()
        except TensorParallelError as raised:
            error = raised
        errors = self.communicator.all_gather_object(error)
        for rank, raised_there in enumerate(errors):
            if raised_there is not None:
                if error is not None and rank == self.rank:
                    raise error
                raise raised_there
        return result  # type: ignore[return-value]


def _check_versions(process_group: dist.ProcessGroup) -> None:
    statement = {"tp-decoder's version": __version__, "torch's version": torch.__version__.partition("+")[0]}
    compare(dist.get_process_group_ranks(process_group), gather_objects(process_group, statement))


def _check_interfaces(backend: str) -> None:
    """Refuses a name of no network interface, of which gloo would say that an address cannot be found."""
    here = [name for _, name in socket.if_nameindex()]
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if backend == "gloo" and named and not set(named.split(",")) <= set(here):
        raise CommunicationError(
            f"GLOO_SOCKET_IFNAME={named} names no network interface of this machine, which has {', '.join(here)}: "
            "name one of these, or unset it"
        )


def _check_gpus(store: dist.distributed_c10d.Store, rank: int, size: int, gpu: str) -> None:
    """Refuses two ranks on one GPU, on all ranks; of NCCL some would hear "Duplicate GPU", and the others nothing."""
    keys = [f"GPU of rank {peer}" for peer in range(size)]
    store.set(keys[rank], f"{gpu} of {this_host()}")
    of_gpus: dict[bytes, list[int]] = {}
    for peer, place in enumerate(store.multi_get(keys)):
        of_gpus.setdefault(place, []).append(peer)
    for place, ranks in of_gpus.items():
        if len(ranks) > 1:
            raise CommunicationError(
                f"ranks {', '.join(map(str, ranks))} are all on GPU {place.decode().split()[0]}: NCCL takes one rank a "
                "GPU; let each see one of its own (CUDA_VISIBLE_DEVICES), or use --backend gloo to share GPUs"
            )


def _bind_device(device_type: str, backend: str) -> torch.device:
    """Chooses and sets this rank's device before any collective is made."""
    if device_type == "cpu":
        if backend == "nccl":
            raise CommunicationError("backend nccl needs CUDA devices: use --backend gloo with --device cpu")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise CommunicationError("device cuda was asked for, but torch sees no CUDA device: use --device cpu")
    devices = torch.cuda.device_count()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    one_for_each = devices == 1 and "CUDA_VISIBLE_DEVICES" in os.environ  # perhaps another: `_check_gpus` will tell
    if backend == "nccl" and local_world_size > devices and not one_for_each:
        raise CommunicationError(
            f"{local_world_size} ranks on this host but {devices} GPUs: NCCL takes one rank a GPU; "
            "use fewer ranks, or --backend gloo to share GPUs"
        )
    if backend == "nccl" and not dist.is_nccl_available():
        raise CommunicationError("this torch was built without NCCL: use --backend gloo")
    bound = torch.device("cuda", local_rank % devices)
    torch.cuda.set_device(bound)
    return bound
