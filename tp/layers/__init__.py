"""Parallel layers: usable alone, in a module of the user's own, with a group that the user passes."""

from tp.layers.attention import GroupedQueryAttention
from tp.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from tp.layers.handles import LinearPartial, Normed, Partial
from tp.layers.kv_cache import KVCache
from tp.layers.layout import Layout, LayoutRule, Replicate, ShardTokens, automatic_layout
from tp.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    merged_columns,
)
from tp.layers.mlp import GatedMLP, PlainMLP
from tp.layers.norm import LayerNorm, RMSNorm
from tp.layers.residual_stream import ResidualStream
from tp.layers.rotary import RotaryEmbedding
from tp.layers.sharded_logits import ShardedLogits
from tp.layers.step import SequenceSlice, Step
from tp.layers.tap import Site, Tap

__all__ = [
    "ColumnParallelLinear",
    "GatedMLP",
    "GroupedQueryAttention",
    "KVCache",
    "LayerNorm",
    "Layout",
    "LayoutRule",
    "LinearPartial",
    "MergedColumnParallelLinear",
    "Normed",
    "ParallelLMHead",
    "Partial",
    "PlainMLP",
    "QKVParallelLinear",
    "RMSNorm",
    "Replicate",
    "ResidualStream",
    "RotaryEmbedding",
    "RowParallelLinear",
    "SequenceSlice",
    "ShardTokens",
    "ShardedLogits",
    "Site",
    "Step",
    "Tap",
    "VocabParallelEmbedding",
    "automatic_layout",
    "merged_columns",
]
