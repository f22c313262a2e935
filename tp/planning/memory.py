"""Bytes that one rank takes, serving and training, and the largest request that fits."""

from __future__ import annotations

from dataclasses import dataclass

from tp.parallel import shared_memory, symmetric_memory
from tp.planning.activations import STATISTIC_BYTES, layer_activations, step_activations
from tp.planning.parameters import RankModel
from tp.training.cross_entropy import LOSS_CHUNK

PARAMETER_BYTES = 4
"""Of a parameter in training, and of its gradient: float32 (`tp.training.mixed_precision`)."""
MOMENT_BYTES = 8
"""Of a parameter's two moments in AdamW."""
TOKENIZER_BYTES = 1000
"""Of an entry of the vocabulary, where the tokenizer is: measured 0.9 kB at 49,152 entries, and 1.1 kB at 151,936."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank, by what they hold.

    Attributes:
        weights: parameters; exact.
        cache: keys and values; exact.
        activations: the most at any time.
        gradients, moments: of training.
        buffers: that ranks read of each other.
        runtime: the process, its libraries and contexts.
    """

    weights: int
    cache: int
    activations: int
    gradients: int
    moments: int
    buffers: int
    runtime: int

    @property
    def total(self) -> int:
        return (
            self.weights + self.cache + self.activations + self.gradients + self.moments + self.buffers + self.runtime
        )


def serving_memory(
    model: RankModel, rank: int, device: str, runtime: int, *, batch: int, context: int, chunk: int, sharded: bool
) -> RankMemory:
    """Of a rank that serves `batch` sequences of up to `context` tokens.

    Args:
        rank: which one, since the first has the tokenizer.
        device: "cuda", or "cpu", whose memory the tokenizer is in too.
        runtime: see `RankMemory`.
        chunk: most tokens of a step of prefill.
        sharded: sequence parallelism in those steps.
    """
    prefill = step_activations(model, min(chunk, batch * context), min(batch, chunk), sharded=sharded)
    decode = step_activations(model, batch, batch, sharded=False)
    return RankMemory(
        weights=model.weight_bytes,
        cache=model.cache_bytes(batch, context),
        activations=max(prefill, decode),
        gradients=0,
        moments=0,
        buffers=communication_buffers(device, model.tp_size),
        runtime=runtime + (TOKENIZER_BYTES * model.config.vocab_size if device == "cpu" and rank == 0 else 0),
    )


def training_memory(
    model: RankModel, rank: int, device: str, runtime: int, *, batch: int, context: int, sharded: bool, recomputed: bool
) -> RankMemory:
    """Of a rank that trains on `batch` rows of `context` tokens at once, in float32 parameters and AdamW.

    Args:
        rank: which one, since its heads may fall into several runs.
        sharded: sequence parallelism. recomputed: activation checkpointing.
    """
    parameters, itemsize = model.parameters, model.precision.itemsize
    tokens = batch * context
    of_layer = layer_activations(model.config, tokens, itemsize, model.tp_size, rank, sharded=sharded).total
    casts = 0 if itemsize >= PARAMETER_BYTES else sum(matrix.elements for matrix in parameters.layer_matrices)
    of_layer += casts * itemsize  # rounded copies of the weights, which their products keep
    stream = model.row_bytes * (-(-tokens // model.tp_size) if sharded else tokens)
    layers = parameters.num_layers
    kept = layers * stream + of_layer if recomputed else layers * of_layer
    return RankMemory(
        weights=parameters.elements * PARAMETER_BYTES,
        cache=0,
        activations=kept + stream + loss_activations(model, device, tokens),
        gradients=parameters.elements * PARAMETER_BYTES,
        moments=parameters.elements * MOMENT_BYTES,
        buffers=communication_buffers(device, model.tp_size),
        runtime=runtime,
    )


def communication_buffers(device: str, tp_size: int) -> int:
    """Of ranks of one host: symmetric memory on GPUs, the shared segment's two slots of each rank on CPUs."""
    if tp_size == 1:
        return 0
    if device == "cuda":
        return symmetric_memory.PLACES * symmetric_memory.LARGEST_BYTES
    return 2 * tp_size * shared_memory.SLOT_BYTES


def loss_activations(model: RankModel, device: str, tokens: int) -> int:
    """What the head and its loss hold at once, see `tp.training.cross_entropy.chunked_head_cross_entropy`.

    All the time: the head's gathered input with its gradient, the head's gradient in float32, and its rounded copy. Of
    each chunk, whichever is more: logits, their gradient and that of the chunk before, on CPUs with two float32 copies;
    or logits, their gradient and what it adds to that of the input, or of the head, which CPUs widen first.
    """
    head, itemsize, chunk = model.parameters.head, model.precision.itemsize, min(tokens, LOSS_CHUNK)
    rounded, on_cpu = itemsize < PARAMETER_BYTES, device == "cpu"
    logits = chunk * head.rows
    of_a_logit = (3 if tokens > LOSS_CHUNK else 2) * itemsize + (2 * STATISTIC_BYTES if on_cpu else 0)
    of_a_weight = itemsize + (PARAMETER_BYTES if rounded and on_cpu else 0)
    added = max(chunk * model.row_bytes, head.elements * of_a_weight)
    return (
        2 * tokens * model.row_bytes
        + head.elements * (PARAMETER_BYTES + (itemsize if rounded else 0))
        + max(logits * of_a_logit, 2 * logits * itemsize + added)
    )
