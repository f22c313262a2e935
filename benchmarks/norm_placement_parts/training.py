"""A small model trained on real text with and without warm-up, in post- and in pre-norm."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tp.config import ModelConfig
from tp.models import CausalLM, initialise_parameters
from tp.models.initialisation import xavier_normal
from tp.parallel import TensorParallelGroup
from tp.rope_config import RopeConfig
from tp.training.data import (
    DocumentEncoder,
    EvaluationBatches,
    PackedBatches,
    PlainText,
    TokenizedDataset,
    read_documents,
    split_documents,
    train_tokenizer,
)
from tp.training.optimizer import adamw
from tp.training.schedule import CosineSchedule
from tp.training.train_step import Learner

TEXT = Path(__file__).parents[1] / "data" / "king-james-bible.txt"
VOCAB_SIZE = 512
NUM_LAYERS, HIDDEN_SIZE, NUM_HEADS = 6, 64, 4
SEQUENCE_LENGTH, BATCH_SIZE = 64, 8
STEPS, WARMUP_STEPS = 400, 100
SEEDS_BY_LEARNING_RATE = {1e-3: 5, 3e-3: 3}
HELD_OUT_TOKENS = 16384
LOSSES_EVERY = 10
"""Steps whose mean loss is one point of a curve."""

Data = tuple[TokenizedDataset, TokenizedDataset]
"""Training part, held-out part."""


@dataclass(frozen=True)
class Trial:
    """One run: where the norms are, how the learning rate begins, and what is drawn."""

    placement: str
    warmup: bool
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.placement}, {'warm-up' if self.warmup else 'no warm-up'}, {self.learning_rate:g}, {self.seed}"


def trials(most_seeds: int | None = None) -> Iterator[Trial]:
    """All runs, or those of the first seeds."""
    for learning_rate, num_seeds in SEEDS_BY_LEARNING_RATE.items():
        seeds = range(num_seeds)[:most_seeds]
        for seed, placement, warmup in itertools.product(seeds, ("post", "pre"), (True, False)):
            yield Trial(placement, warmup, learning_rate, seed)


def datasets() -> Data:
    """The King James Bible, a tenth of its chapters held out; the same on every rank."""
    documents, held_out = split_documents(list(read_documents([TEXT])), 0.1)
    tokenizer = train_tokenizer((d.text for d in documents if isinstance(d, PlainText)), VOCAB_SIZE)
    encoder = DocumentEncoder(tokenizer)
    training, rest = (TokenizedDataset.of_documents(encoder.encode_all(part)) for part in (documents, held_out))
    few = np.count_nonzero(rest.lengths.cumsum() < HELD_OUT_TOKENS)
    return training, rest.part(np.arange(few))


def run(trial: Trial, data: Data, group: TensorParallelGroup) -> dict[str, Any]:
    """Mean loss of every `LOSSES_EVERY` steps, and the held-out loss at the end, in nats a token."""
    model = CausalLM(_config(trial.placement), group)
    initialise_parameters(model, trial.seed, _deviation)
    optimizer = adamw(model, learning_rate=trial.learning_rate, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0)
    learner = Learner(model, optimizer, max_grad_norm=float("inf"))
    rate = CosineSchedule(trial.learning_rate, 0.0, WARMUP_STEPS if trial.warmup else 0, STEPS)
    batches = PackedBatches(data[0], SEQUENCE_LENGTH, BATCH_SIZE, seed=trial.seed)
    losses = [learner.step([batches.batch(step)], rate(step)).loss for step in range(STEPS)]
    held_out, _ = learner.evaluate(EvaluationBatches(data[1], SEQUENCE_LENGTH, 64))
    return {"losses": np.array(losses).reshape(-1, LOSSES_EVERY).mean(1).tolist(), "held_out": held_out}


def _config(placement: str) -> ModelConfig:
    return ModelConfig(
        model_type="tp_decoder", hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS, num_attention_heads=NUM_HEADS,
        num_kv_heads=NUM_HEADS, head_dim=HIDDEN_SIZE // NUM_HEADS, intermediate_size=4 * HIDDEN_SIZE,
        vocab_size=VOCAB_SIZE, max_position_embeddings=SEQUENCE_LENGTH, rope=RopeConfig(), norm_eps=1e-5,
        norm="layer_norm", norm_placement=placement, gated_mlp=False, activation="relu",
    )  # fmt: skip


def _deviation(name: str, shape: tuple[int, int]) -> float:
    """Xavier's, queries and keys too; states begin as N(0, 1), as those of the original Transformer."""
    return 1.0 if "embed_tokens" in name else xavier_normal(name, shape)
