"""The model with its loss as its output."""

from __future__ import annotations

from torch import Tensor, nn

from tp.models import CausalLM
from tp.training.cross_entropy import chunked_head_cross_entropy
from tp.training.data.packing import TrainingBatch


class LossModule(nn.Module):
    """The model with its loss as its output, so that data parallelism can wrap it: batch, count → Σ loss / count."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: TrainingBatch, count: int, dropout_seed: int | None = None) -> Tensor:
        decoder = self.model.model
        normed = decoder.final_norm(decoder(batch.step(dropout_seed)))
        return chunked_head_cross_entropy(self.model.lm_head, normed, batch.labels, count=count)
