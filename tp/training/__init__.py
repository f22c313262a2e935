"""Training: loss over a split vocabulary, gradient clipping over split parameters, and what keeps replicas equal."""

from tp.training.activation_checkpointing import checkpoint_layers
from tp.training.clip_grad import clip_grad_norm_, grad_norm
from tp.training.cross_entropy import IGNORE_INDEX, chunked_head_cross_entropy, vocab_parallel_cross_entropy
from tp.training.replicas import check_replicas

__all__ = [
    "IGNORE_INDEX",
    "check_replicas",
    "checkpoint_layers",
    "chunked_head_cross_entropy",
    "clip_grad_norm_",
    "grad_norm",
    "vocab_parallel_cross_entropy",
]
