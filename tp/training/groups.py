"""The groups that a rank of a training run belongs to: tensor parallel inside, data parallel outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from tp.checkpoint.together import work_together
from tp.errors import RequestError
from tp.parallel.group import TensorParallelGroup
from tp.parallel.timeouts import timeout_of

T = TypeVar("T")


@dataclass(frozen=True)
class TrainingGroups:
    """A rank's groups. Neighbouring ranks share a replica: rank = data.rank · tensor.size + tensor.rank.

    Attributes:
        world: all ranks of the run.
        tensor: the ranks that one replica of the model is split over.
        data: the ranks that hold this rank's slices of the other replicas.
        control: all ranks again, over a connection of its own on the CPU, so that ranks can wait for each other
            while some of them communicate in `tensor`; `world` itself where there is one replica.
    """

    world: TensorParallelGroup
    tensor: TensorParallelGroup
    data: TensorParallelGroup
    control: TensorParallelGroup

    @classmethod
    def of(cls, world: TensorParallelGroup, data_parallel_size: int = 1) -> TrainingGroups:
        """Divides `world`, which must be all of torch's default group if there is more than one replica.

        Raises:
            RequestError: a world that is no multiple of `data_parallel_size`.
        """
        if world.size % data_parallel_size:
            raise RequestError(f"{world.size} ranks cannot be divided into {data_parallel_size} replicas of equal size")
        if data_parallel_size == 1:
            return cls(world, world, TensorParallelGroup.alone(world.device), world)
        assert world.process_group is not None
        timeout = timeout_of(world.process_group, world.device)  # torch gives groups within the world 30 minutes
        replicas = torch.arange(world.size).view(data_parallel_size, -1)
        data, tensor = (
            TensorParallelGroup.from_process_group(
                dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)[0], world.device
            )
            for rows in (replicas.T, replicas)
        )
        if tensor.size == 1:
            tensor = TensorParallelGroup.alone(world.device)
        control = TensorParallelGroup.from_process_group(dist.new_group(backend="gloo", timeout=timeout), "cpu")
        return cls(world, tensor, data, control)

    def together(self, action: Callable[[], T]) -> T:
        """Runs `action`, which may communicate in `tensor`, on all ranks, however long it takes on some of them.

        Raises:
            TensorParallelError: that `action` raised on any rank; on all ranks.
        """
        return action() if self.data.size == 1 else work_together(self.control, action)

    def on_first_replica(self, action: Callable[[], object]) -> None:
        """`together`, for the ranks of the first replica; the others wait for them."""
        self.together(lambda: action() if self.data.rank == 0 else None)
