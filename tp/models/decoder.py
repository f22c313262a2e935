"""The decoder: embedding, layers, final norm, around one residual stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tp.config import ModelConfig
from tp.layers.attention import GroupedQueryAttention
from tp.layers.embedding import VocabParallelEmbedding
from tp.layers.handles import Normed, Partial
from tp.layers.kv_cache import KVCache, LayerCache
from tp.layers.layout import LayoutRule, automatic_layout
from tp.layers.mlp import GatedMLP, PlainMLP
from tp.layers.norm import Norm
from tp.layers.residual_stream import ResidualStream
from tp.layers.rotary import RotaryEmbedding
from tp.layers.shared_gradients import finished_gradients
from tp.layers.step import Step
from tp.layers.tap import Site, Tap
from tp.models.norm_placement import NORMS, PLACEMENTS, add_norms
from tp.parallel.group import TensorParallelGroup


class DecoderLayer(nn.Module):
    """h = x + Attention(Norm(x)); y = h + MLP(Norm(h)). The stream combines the ranks' partial sums at each read.

    So in pre-norm; where the norms stand is `config.norm_placement`.
    """

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        group: TensorParallelGroup,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.index = index
        placement = PLACEMENTS[config.norm_placement]
        self.attention_norms = add_norms(self, placement.attention, config, group, dtype=dtype, device=device)
        self.self_attn = GroupedQueryAttention(config, index, group, dtype=dtype, device=device)
        self.mlp_norms = add_norms(self, placement.mlp, config, group, dtype=dtype, device=device)
        self.mlp = (GatedMLP if config.gated_mlp else PlainMLP)(
            config.hidden_size,
            config.intermediate_size,
            config.activation,
            group,
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
        )

    def forward(
        self,
        stream: ResidualStream,
        step: Step,
        rotary: tuple[Tensor, Tensor],
        cache: LayerCache | None,
        rows: Tensor | None = None,
    ) -> ResidualStream:
        """The stream after the layer.

        Args:
            rotary: cos and sin of the step's tokens. cache: this layer's.
            rows: [B] int64, the tokens whose state alone is wanted, for which a tap has to be absent; None: all.
        """
        attention, mlp = self.attention_norms, self.mlp_norms
        with finished_gradients(self, stream.layout):
            a = self.self_attn(stream.read(attention.of_input), step, rotary, cache, stream.tap)
            if rows is not None:
                if not len(rows):
                    return stream  # its keys and values are in the cache
                stream, a = stream.take(rows), a.select(rows)
            stream.write(a, Site(self.index, "attn_out"), attention.of_write, attention.of_state)
            del a  # the stream has it
            m = self.mlp(stream.read(mlp.of_input))
            stream.write(m, Site(self.index, "mlp_out"), mlp.of_write, mlp.of_state)
            if torch.is_grad_enabled():
                stream.settle()  # FSDP takes a layer's parameters away after it, and a pending bias is one
        return stream


def run_layer(layer: nn.Module, stream: ResidualStream, *inputs: Any) -> ResidualStream:
    """Calls the layer with the stream and what else its forward takes; what activation checkpointing replaces."""
    result: ResidualStream = layer(stream, *inputs)
    return result


class Decoder(nn.Module):
    """Token ids → the residual stream after the last layer.

    Attributes:
        choose_layout: decides, once a forward, how the stream lies over the ranks.
        run_layer: how a layer is called.
        tap: sees and may edit what passes the named points of every forward, see `tp.layers.tap`.
    """

    def __init__(
        self,
        config: ModelConfig,
        group: TensorParallelGroup,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.group = group
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, group, dtype=dtype, device=device
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, group, dtype=dtype, device=device) for index in range(config.num_layers)
        )
        self.norm: Norm | None = None
        if PLACEMENTS[config.norm_placement].final:
            self.norm = NORMS[config.norm](config.hidden_size, config.norm_eps, group, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_position_embeddings)
        self.choose_layout: LayoutRule = automatic_layout
        self.run_layer = run_layer
        self.tap: Tap | None = None

    def forward(self, step: Step, cache: KVCache | None = None, rows: Tensor | None = None) -> ResidualStream:
        """Runs the step's tokens through every layer. The stream may hold writes that are still to be combined.

        Args:
            cache: extended by the step's keys and values; None where every sequence begins and ends in the step.
            rows: [B] int64, the tokens whose last state is wanted: the stream is then of those, or of no use where
                there are none. None, or a tap: all.
        """
        if cache is not None:
            cache.check_room(step)
        tap = None if self.tap is None else self.tap.on_step(step)
        stream = ResidualStream(self.choose_layout(self.group, step.num_tokens), tap=tap)
        embedding: Partial = self.embed_tokens(step.token_ids)
        stream.write(embedding, Site(None, "embed"))
        rotary = self.rotary(step, embedding.value.dtype)
        del embedding  # the stream has it
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            wanted = rows if index == last and tap is None else None
            stream = self.run_layer(layer, stream, step, rotary, cache.layers[index] if cache else None, wanted)
        return stream

    def final_norm(self, stream: ResidualStream) -> Normed:
        """What the LM head reads: the norm of the settled stream, or the stream where its last state is normed."""
        if self.norm is None:
            normed = stream.read(None)
        else:
            with finished_gradients(self.norm, stream.layout):
                normed = stream.read(self.norm)
        if stream.tap is None:
            return normed
        return Normed(stream.tap.on_stream(Site(None, "final_norm"), normed.local, stream.layout), stream.layout)
