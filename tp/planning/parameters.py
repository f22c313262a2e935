"""What one rank's model holds, matrix by matrix: the one place where the planner counts parameters.

The counts are those of `tp.models.CausalLM` on that rank, padding and the copies of shared KV heads included.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tp.config import ModelConfig
from tp.models.norm_placement import PLACEMENTS
from tp.parallel.partition import ceil_div, feature_ranges, kv_head_ranges, query_head_ranges
from tp.planning.precision import Precision

VECTORS_OF_NORM = {"rms_norm": 1, "layer_norm": 2}
"""Vectors of the normalised width, by `ModelConfig.norm`: a weight, and LayerNorm's bias."""


@dataclass(frozen=True)
class Matrix:
    """A rank's share of a weight.

    Attributes:
        name: of its module, such as "qkv_proj".
        rows, columns: output and input features.
    """

    name: str
    rows: int
    columns: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    def nbytes(self, precision: Precision) -> int:
        """What it takes, with the scales of its rows where the weights are quantised."""
        return self.elements * precision.matrix_itemsize + self.rows * precision.row_scale_bytes


@dataclass(frozen=True)
class RankParameters:
    """The parameters of one rank.

    Attributes:
        num_layers: decoder layers, all alike.
        heads, kv_heads: query heads, and KV heads that they read.
        intermediate: features of the MLP.
        layer_matrices: of each layer, in the order of their use.
        layer_vectors: elements of each layer's norms and biases.
        embedding, head: the vocabulary's rows, padding included; one matrix where `tied`.
        final_vectors: elements of the norm before the head.
    """

    num_layers: int
    heads: int
    kv_heads: int
    intermediate: int
    layer_matrices: tuple[Matrix, ...]
    layer_vectors: int
    embedding: Matrix
    head: Matrix
    tied: bool
    final_vectors: int

    @classmethod
    def of(cls, config: ModelConfig, tp_size: int, tp_rank: int) -> RankParameters:
        """Of rank `tp_rank` of `tp_size`.

        Raises:
            ConfigError: t above the number of query heads.
        """
        config.check_degree(tp_size)
        heads = len(query_head_ranges(config.num_attention_heads, tp_size)[tp_rank])
        kv_heads = len(kv_head_ranges(config.num_attention_heads, config.num_kv_heads, tp_size)[tp_rank])
        intermediate = len(feature_ranges(config.intermediate_size, tp_size)[tp_rank])
        width = config.hidden_size
        qkv_rows = (heads + 2 * kv_heads) * config.head_dim
        up_rows = (2 if config.gated_mlp else 1) * intermediate
        vocabulary = ceil_div(config.vocab_size, tp_size)
        return cls(
            num_layers=config.num_layers,
            heads=heads,
            kv_heads=kv_heads,
            intermediate=intermediate,
            layer_matrices=(
                Matrix("qkv_proj", qkv_rows, width),
                Matrix("o_proj", width, heads * config.head_dim),
                Matrix("gate_up_proj" if config.gated_mlp else "up_proj", up_rows, width),
                Matrix("down_proj", width, intermediate),
            ),
            layer_vectors=_norm_elements(config) + _bias_elements(config, qkv_rows, up_rows),
            embedding=Matrix("embed_tokens", vocabulary, width),
            head=Matrix("lm_head", vocabulary, width),
            tied=config.tie_word_embeddings,
            final_vectors=_vectors_of_a_norm(config) if PLACEMENTS[config.norm_placement].final else 0,
        )

    @property
    def elements(self) -> int:
        """All of them, tied ones once."""
        matrices = sum(matrix.elements for matrix in self.layer_matrices) * self.num_layers
        tables = self.embedding.elements + (0 if self.tied else self.head.elements)
        return matrices + tables + self._vectors

    def nbytes(self, precision: Precision) -> int:
        """What they take, as `tp.checkpoint.weight_bytes` counts it."""
        matrices = sum(matrix.nbytes(precision) for matrix in self.layer_matrices) * self.num_layers
        tables = self.embedding.nbytes(precision) + (0 if self.tied else self.head.nbytes(precision))
        return matrices + tables + self._vectors * precision.itemsize

    @property
    def _vectors(self) -> int:
        return self.num_layers * self.layer_vectors + self.final_vectors


@dataclass(frozen=True)
class RankModel:
    """What a rank runs.

    Attributes:
        config: global sizes.
        parameters: of this rank.
        tp_size: the degree.
        precision: of its numbers.
    """

    config: ModelConfig
    parameters: RankParameters
    tp_size: int
    precision: Precision

    @property
    def query_width(self) -> int:
        return self.parameters.heads * self.config.head_dim

    @property
    def kv_width(self) -> int:
        return self.parameters.kv_heads * self.config.head_dim

    @property
    def row_bytes(self) -> int:
        """Of a token in the stream."""
        return self.config.hidden_size * self.precision.itemsize

    @property
    def weight_bytes(self) -> int:
        return self.parameters.nbytes(self.precision)

    def cache_bytes(self, num_slots: int, capacity: int) -> int:
        """Of keys and values of `num_slots` sequences of up to `capacity` tokens, as `KVCache` makes them."""
        elements = num_slots * capacity * self.parameters.num_layers * 2 * self.kv_width
        return elements * self.precision.itemsize


@functools.cache
def rank_models(config: ModelConfig, precision: Precision, tp_size: int) -> tuple[RankModel, ...]:
    """Every rank of a group.

    Raises:
        ConfigError: t above the number of query heads.
    """
    ranks = (RankParameters.of(config, tp_size, rank) for rank in range(tp_size))
    return tuple(RankModel(config, parameters, tp_size, precision) for parameters in ranks)


def distinct_ranks(config: ModelConfig, precision: Precision, tp_size: int) -> tuple[RankModel, ...]:
    """Every rank that holds other sizes than those before it; all others are like one of these."""
    return tuple(dict.fromkeys(rank_models(config, precision, tp_size)))


def _vectors_of_a_norm(config: ModelConfig) -> int:
    return VECTORS_OF_NORM[config.norm] * config.hidden_size


def _norm_elements(config: ModelConfig) -> int:
    placement = PLACEMENTS[config.norm_placement]
    norms = len(placement.attention) + len(placement.mlp)
    return norms * _vectors_of_a_norm(config) + (2 * config.head_dim if config.qk_norm else 0)


def _bias_elements(config: ModelConfig, qkv_rows: int, up_rows: int) -> int:
    """Biases of column-parallel linears are split, those of row-parallel ones whole on every rank."""
    return (
        (qkv_rows if config.qkv_bias else 0)
        + (config.hidden_size if config.attention_output_bias else 0)
        + (up_rows + config.hidden_size if config.mlp_bias else 0)
    )
