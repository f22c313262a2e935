"""The collectives of a step: which, of how many bytes, how often. They are those that the layers enter.

tests/test_planning_work.py compares them with what a communicator counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from tp.config import ModelConfig
from tp.generation.decisions import first_bytes
from tp.models.norm_placement import PLACEMENTS
from tp.parallel.partition import held_segments, kv_head_ranges
from tp.planning.collectives import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE_SCATTER
from tp.planning.parameters import VECTORS_OF_NORM, RankModel
from tp.training.cross_entropy import LOSS_CHUNK

LOSS_STATISTIC_BYTES = 16
"""Of a token and rank: four float32."""
GRADIENT_BYTES = 4
"""Of an element of a parameter's gradient: float32."""
GRADIENT_NORM_BYTES = 8
CANDIDATE_BYTES = 20
"""Of a sequence and rank that the greedy sampler gathers, see `tp.generation.sampler`."""


@dataclass(frozen=True)
class Collective:
    """A collective of the whole group, `count` times; bytes as `CommunicationStatistics` counts them."""

    operation: str
    nbytes: int
    count: int


def step_collectives(
    model: RankModel, tokens: int, sharded: bool, num_logits: int, num_sampled: int
) -> tuple[Collective, ...]:
    """Writes to the stream are the embedding's and two a layer; the last two are cut to the rows that give logits.

    Where a step gives no logits, nobody asks for them. Every step ends in rank 0's decision.

    Args:
        num_logits: rows of the head. num_sampled: those of them that a token is chosen from.
    """
    layers, rows, few_rows = model.parameters.num_layers, tokens * model.row_bytes, num_logits * model.row_bytes
    cut = num_logits != tokens
    whole = 2 * layers - 1 if cut else 2 * layers
    made = []
    if sharded:
        made += [Collective(REDUCE_SCATTER, rows, whole), Collective(ALL_GATHER, rows, whole)]
        made += [Collective(ALL_REDUCE, few_rows, 3 if cut else 2)] if num_logits else []
    elif cut:
        made += [Collective(ALL_REDUCE, rows, whole)]
        made += [Collective(ALL_REDUCE, few_rows, 2)] if num_logits else []
    else:
        made += [Collective(ALL_REDUCE, rows, whole + 1)]
    candidates, decision = num_sampled * CANDIDATE_BYTES, first_bytes(num_sampled)
    made += [Collective(ALL_GATHER, model.tp_size * candidates, 1)] if num_sampled else []
    return (*made, Collective(BROADCAST, decision, 1))


def training_collectives(model: RankModel, tokens: int, sharded: bool, recomputed: bool) -> tuple[Collective, ...]:
    """Each write and each read of the stream has its conjugate in the backward; what was gathered is gathered again.

    A layer that is computed again stops before its last write, which nothing in its backward needs.
    """
    layers, rows = model.parameters.num_layers, tokens * model.row_bytes
    writes, reads = 1 + 2 * layers, 2 * layers + 1
    again = layers if recomputed else 0
    if sharded:
        made = [
            Collective(REDUCE_SCATTER, rows, writes + reads + again),
            Collective(ALL_GATHER, rows, reads + writes + 2 * layers + 2 * again),
        ]
    else:
        made = [Collective(ALL_REDUCE, rows, writes + reads + again)]
    of_layer, of_end = shared_gradient_elements(model.config, model.tp_size, sharded)
    made += [Collective(ALL_REDUCE, GRADIENT_BYTES * of_layer, layers)] if of_layer else []
    made += [Collective(ALL_REDUCE, GRADIENT_BYTES * of_end, 1)] if of_end else []
    of_token, (whole_chunks, rest) = model.tp_size * LOSS_STATISTIC_BYTES, divmod(tokens, LOSS_CHUNK)
    made += [Collective(ALL_GATHER, of_token * LOSS_CHUNK, whole_chunks)] if whole_chunks else []
    made += [Collective(ALL_GATHER, of_token * rest, 1)] if rest else []
    return (*made, Collective(ALL_REDUCE, GRADIENT_NORM_BYTES, 1))


def shared_gradient_elements(config: ModelConfig, tp_size: int, sharded: bool) -> tuple[int, int]:
    """Elements whose gradients ranks add up, of each layer and of the final norm; see `tp.layers.shared_gradients`."""
    ranges = kv_head_ranges(config.num_attention_heads, config.num_kv_heads, tp_size)
    shared_heads = sum(len(part.units) for part in held_segments(ranges) if len(part.holders) > 1)
    of_heads = 2 * shared_heads * config.head_dim * (config.hidden_size + (1 if config.qkv_bias else 0))
    of_heads += 2 * config.head_dim if config.qk_norm else 0
    if not sharded:
        return of_heads, 0
    placement = PLACEMENTS[config.norm_placement]
    of_norm = VECTORS_OF_NORM[config.norm] * config.hidden_size
    biases = (config.attention_output_bias + config.mlp_bias) * config.hidden_size
    of_layer = of_heads + (len(placement.attention) + len(placement.mlp)) * of_norm + biases
    return of_layer, of_norm if placement.final else 0
