"""One optimiser step: micro-batches accumulated over data-parallel ranks, clipped, applied."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tp.errors import NumericalError
from tp.models import CausalLM
from tp.parallel.group import TensorParallelGroup
from tp.training.clip_grad import clip_grad_norm_
from tp.training.cross_entropy import IGNORE_INDEX, valid_label_count
from tp.training.data.packing import TrainingBatch
from tp.training.loss_module import LossModule
from tp.training.not_finite import ADVICE, locate_non_finite


@dataclass(frozen=True)
class StepReport:
    """What one step did, equal on all ranks.

    Attributes:
        loss: mean over the valid labels of all micro-batches and data-parallel ranks, in nats.
        grad_norm: of the whole gradient, before clipping.
        num_labels: valid labels, of all data-parallel ranks.
    """

    loss: float
    grad_norm: float
    num_labels: int


class Learner:
    """A model, its optimiser and its place among data-parallel ranks.

    Args:
        model: this rank's share, on its tensor-parallel group.
        optimizer: over its parameters.
        data_parallel_group: the ranks that hold the same share and see other tokens; alone by default.
        max_grad_norm: gradients are scaled down to this norm.
    """

    def __init__(
        self,
        model: CausalLM,
        optimizer: torch.optim.Optimizer,
        data_parallel_group: TensorParallelGroup | None = None,
        max_grad_norm: float = 1.0,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.data_parallel = data_parallel_group or TensorParallelGroup.alone(model.group.device)
        self.max_grad_norm = max_grad_norm
        self.loss_module: nn.Module = LossModule(model)
        if self.data_parallel.size > 1:
            self.loss_module = DistributedDataParallel(
                self.loss_module, process_group=self.data_parallel.process_group, broadcast_buffers=False
            )

    def step(
        self, micro_batches: Sequence[TrainingBatch], learning_rate: float, dropout_seed: int | None = None
    ) -> StepReport:
        """Forward, backward, clip and update over this rank's micro-batches of one global batch.

        Raises:
            RequestError: a label outside the vocabulary, on all ranks.
            NumericalError: the loss or the gradient is not finite, on all ranks, naming where it first arises; before
                the update, so that parameters and optimiser are as they were.
        """
        micro_batches = [batch.to(self.model.group.device) for batch in micro_batches]
        labels = torch.cat([batch.labels for batch in micro_batches])
        count = valid_label_count(labels, self.model.config.vocab_size, data_parallel_group=self.data_parallel)
        first_micro_batch = self.data_parallel.rank * len(micro_batches)
        seeds = [
            None if dropout_seed is None else dropout_seed + first_micro_batch + i for i in range(len(micro_batches))
        ]
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float64, device=labels.device)
        for index, (batch, seed) in enumerate(zip(micro_batches, seeds, strict=True)):
            with self._synchronised(last=index == len(micro_batches) - 1):
                loss = self.loss_module(batch, count, seed)
                (loss * self.data_parallel.size).backward()  # data parallelism averages; we want the sum
            total += loss.detach()
        total = self.data_parallel.communicator.all_reduce(total)
        norm = clip_grad_norm_(self.model, self.max_grad_norm, self.model.group)
        report = StepReport(total.item(), norm.item(), count)
        if not (math.isfinite(report.loss) and math.isfinite(report.grad_norm)):
            where = locate_non_finite(
                self.model, list(zip(micro_batches, seeds, strict=True)), self.data_parallel, count
            )
            raise NumericalError(f"loss is {report.loss}, gradient norm {report.grad_norm}, {where}: {ADVICE}")
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        return report

    @torch.no_grad()
    def evaluate(self, batches: Iterable[TrainingBatch]) -> tuple[float, int]:
        """Mean loss in nats over the batches of all data-parallel ranks, and how many labels it is the mean of.

        Raises:
            NumericalError: it is not finite; on all ranks, naming where that first arises.
        """
        self.model.eval()
        bad: list[tuple[TrainingBatch, None]] = []
        sums = torch.zeros(2, dtype=torch.float64, device=self.model.group.device)
        module = LossModule(self.model)
        for batch in batches:
            batch = batch.to(self.model.group.device)
            loss = module(batch, 1).double()
            if not bad and not math.isfinite(loss.item()):
                bad.append((batch, None))
            sums[0] += loss
            sums[1] += (batch.labels != IGNORE_INDEX).sum()
        total, count = self.data_parallel.communicator.all_reduce(sums).tolist()
        if not math.isfinite(total):
            where = locate_non_finite(self.model, bad, self.data_parallel, count=1)
            raise NumericalError(f"evaluation loss is {total}, {where}: {ADVICE}")
        return total / max(count, 1), int(count)

    def _synchronised(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Data-parallel ranks exchange gradients once, in the backward of the last micro-batch."""
        if last or not isinstance(self.loss_module, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.loss_module.no_sync()
