"""Activation checkpointing (Chen et al. 2016, arXiv:1604.06174): layers recomputed in the backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tp.layers.residual_stream import ResidualStream
from tp.models import CausalLM


def checkpoint_layers(model: CausalLM) -> None:
    """Makes every decoder layer keep its input only and compute itself again in the backward."""
    model.model.run_layer = run_checkpointed_layer


def run_checkpointed_layer(layer: nn.Module, stream: ResidualStream, *inputs: Any) -> ResidualStream:
    """One layer from settled state to settled state.

    The checkpointed function takes and returns tensors: a stream that is changed inside it would be changed a second
    time when it is computed again.
    """

    def settled_layer(base: Tensor) -> Tensor:
        inner = ResidualStream(stream.layout, base=base, tap=stream.tap)
        result: ResidualStream = layer(inner, *inputs)
        return result.settle()

    base: Any = checkpoint(settled_layer, stream.settle(), use_reentrant=False)
    return ResidualStream(stream.layout, base=base, tap=stream.tap)
