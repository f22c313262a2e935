"""A training step's loss and gradients on the device in float32, against the CPU in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu_parts.kernel_values import require_close
from benchmarks.gpu_parts.machine import Machine, qwen2
from benchmarks.gpu_parts.record import Record
from tp.layers import SequenceSlice, Step
from tp.models import CausalLM, initialise_parameters
from tp.parallel import TensorParallelGroup
from tp.training import chunked_head_cross_entropy

BOUND = 1e-4


def run(record: Record, machine: Machine) -> None:
    """One batch of two sequences, through every layer and the loss."""
    config = qwen2(320, 3, 10, 2, 32, 704, 1003, tied=True) if machine.compiles else qwen2(12, 2, 3, 1, 4, 20, 31, True)
    length = 96 if machine.compiles else 4
    with record.attempt("loss and gradients against float64") as found:
        models = [
            CausalLM(config, TensorParallelGroup.alone(device), dtype=dtype, device=device)
            for device, dtype in ((torch.device("cpu"), torch.float64), (machine.device, torch.float32))
        ]
        initialise_parameters(models[0], seed=0, std=0.05)
        models[1].load_state_dict(models[0].state_dict())
        models[0].load_state_dict(models[1].state_dict())  # what float32 made of them
        torch.manual_seed(0)
        token_ids, labels = (torch.randint(config.vocab_size, (2 * length,)) for _ in range(2))
        losses = [loss_of(model, token_ids, labels) for model in models]
        for loss in losses:
            loss.backward()
        require_close(losses[1].detach().cpu(), losses[0].detach(), BOUND, "loss", found)
        for (name, exact), ours in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert exact.grad is not None and ours.grad is not None
            require_close(ours.grad.cpu(), exact.grad, BOUND, name, found)


def loss_of(model: CausalLM, token_ids: Tensor, labels: Tensor) -> Tensor:
    """Mean over all tokens, of two sequences as long as each other."""
    pieces = (SequenceSlice(len(token_ids) // 2),) * 2
    stream = model.residual_stream(Step(token_ids.to(model.group.device), pieces))
    return chunked_head_cross_entropy(
        model.lm_head, model.model.final_norm(stream), labels.to(model.group.device), chunk_size=len(labels) // 2 + 1
    )
