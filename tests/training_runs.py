"""A small training run, data and model included, that tests start, stop and resume on any ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from tp.config import ModelConfig
from tp.layers.layout import automatic_layout
from tp.models import CausalLM, initialise_parameters
from tp.parallel import TensorParallelGroup
from tp.rope_config import RopeConfig
from tp.training.data import EncodedDocument, EvaluationBatches, PackedBatches, TokenizedDataset
from tp.training.groups import TrainingGroups
from tp.training.mixed_precision import compute_in
from tp.training.optimizer import adamw
from tp.training.schedule import CosineSchedule
from tp.training.store import CheckpointStore
from tp.training.train_step import Learner
from tp.training.trainer import EvaluationMetrics, StepMetrics, Trainer, TrainingSchedule

STEPS = 8
LENGTH, ROWS = 11, 4
"""Tokens a row, rows of a global batch."""
CONFIG = ModelConfig(
    model_type="llama",
    hidden_size=45,
    num_layers=2,
    num_attention_heads=9,
    num_kv_heads=3,
    head_dim=16,
    intermediate_size=71,
    vocab_size=103,
    max_position_embeddings=128,
    rope=RopeConfig(rope_theta=3000.0),
    norm_eps=1e-6,
    activation="silu",
    qkv_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
    tie_word_embeddings=True,
)


def documents(count: int, seed: int) -> TokenizedDataset:
    """Documents of odd lengths in which a token says something about the next."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        length = 3 + (7 * index) % 20
        ids = [int(i) % CONFIG.vocab_size for i in torch.randint(0, 9, (length,), generator=generator).cumsum(0)]
        found.append(EncodedDocument(ids, [True] * length, length, index))
    return TokenizedDataset.of_documents(found)


def train(
    group: TensorParallelGroup,
    directory: Path,
    *,
    stop_after: int | None = None,
    replicas: int = 1,
    dtype: torch.dtype = torch.float64,
    compute: torch.dtype | None = None,
    micro_batch: int = 2,
    layout: Any = automatic_layout,
    save_every: int = 0,
    keep: int = 0,
    evaluate_every: int = 0,
    before_save: Any = lambda step: None,
) -> dict[str, Any]:
    """Begins a run in `directory`, or resumes what is there; `stop_after` steps it is asked to stop.

    Returns:
        loss of each step, evaluation loss by step, and steps done.
    """
    groups = TrainingGroups.of(group, replicas)
    model = CausalLM(CONFIG, groups.tensor, dtype=dtype)
    optimizer = adamw(model, learning_rate=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    store = CheckpointStore(directory, keep)
    first = max(store.steps(), default=0)
    group.communicator.all_gather_object(first)  # nobody saves before all have looked
    if first:
        groups.together(lambda: store.load(first, model, optimizer))
    else:
        initialise_parameters(model, seed=5, std=0.1)
    if compute is not None:
        compute_in(model, compute)
    model.model.choose_layout = layout
    share = {"data_parallel_rank": groups.data.rank, "data_parallel_size": groups.data.size}
    packed = PackedBatches(documents(40, 1), LENGTH, micro_batch, seed=2, **share)
    count = ROWS // (micro_batch * replicas)
    seen: dict[str, Any] = {"losses": {}, "evaluations": {}}

    def note(metrics: StepMetrics | EvaluationMetrics) -> None:
        kind = "evaluations" if isinstance(metrics, EvaluationMetrics) else "losses"
        seen[kind][metrics.step] = metrics.loss

    def save(step: int) -> None:
        before_save(step)
        groups.on_first_replica(functools.partial(store.save, step, model, optimizer, None, {"about": "a test"}))

    trainer = Trainer(
        Learner(model, optimizer, groups.data),
        groups.control,
        learning_rate=CosineSchedule(3e-3, 1e-4, 2, STEPS),
        batches=lambda step: [packed.batch(step * count + i) for i in range(count)],
        evaluation=EvaluationBatches(documents(9, 7), LENGTH, 1, **share),
        schedule=TrainingSchedule(STEPS, evaluate_every=evaluate_every, save_every=save_every),
        save=save,
        on_metrics=note,
        stop_requested=lambda: group.rank == group.size - 1 and stop_after in seen["losses"],
    )
    seen["done"] = trainer.run(first)
    return seen
