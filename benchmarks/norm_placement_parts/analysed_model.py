"""The model that Xiong et al. 2020 (arXiv:2002.04745) analyse, as a configuration and a rule for its first weights.

LayerNorm, an MLP of two matrices with ReLU that is as wide as the stream, Xavier's deviations, queries and keys of
zero, so that attention is a uniform average, and states that begin as N(0, 1) in each channel.
"""

from __future__ import annotations

import torch

from tp.config import ModelConfig
from tp.models import CausalLM, initialise_parameters
from tp.models.initialisation import xavier_normal
from tp.parallel import TensorParallelGroup
from tp.rope_config import RopeConfig
from tp.training.data import TrainingBatch

HIDDEN_SIZE, NUM_HEADS = 128, 4
VOCAB_SIZE = 1024
NUM_TOKENS = 64
"""Of a sequence, all different."""


def analysed_config(placement: str, num_layers: int) -> ModelConfig:
    return ModelConfig(
        model_type="tp_decoder", hidden_size=HIDDEN_SIZE, num_layers=num_layers, num_attention_heads=NUM_HEADS,
        num_kv_heads=NUM_HEADS, head_dim=HIDDEN_SIZE // NUM_HEADS, intermediate_size=HIDDEN_SIZE,
        vocab_size=VOCAB_SIZE, max_position_embeddings=NUM_TOKENS, rope=RopeConfig(), norm_eps=1e-5,
        norm="layer_norm", norm_placement=placement, gated_mlp=False, activation="relu",
    )  # fmt: skip


def analysed_deviation(name: str, shape: tuple[int, int]) -> float:
    """Queries and keys 0, embedding 1, everything else Xavier's."""
    if ".q_proj." in name or ".k_proj." in name:
        return 0.0
    return 1.0 if "embed_tokens" in name else xavier_normal(name, shape)


def analysed_model(placement: str, num_layers: int, seed: int, group: TensorParallelGroup) -> CausalLM:
    """In float64, the same model at every degree."""
    model = CausalLM(analysed_config(placement, num_layers), group, dtype=torch.float64)
    initialise_parameters(model, seed, analysed_deviation)
    return model


def random_batch(seed: int) -> TrainingBatch:
    """One sequence of different tokens, whose embeddings are independent draws, with random labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(VOCAB_SIZE, generator=generator)[:NUM_TOKENS]
    labels = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=generator)
    return TrainingBatch(ids, labels, (NUM_TOKENS,))
