"""Where a decoder layer's norms stand: before the sublayers, after their adds, or on both sides of the sublayers.

    pre       x + F(Norm(x))          the identity path stays bare; a final norm before the LM head
    post      Norm(x + F(x))          the original Transformer; the last norm is the final one
    sandwich  x + Norm'(F(Norm(x)))   pre-norm whose writes are normalised too

"On Layer Normalization in the Transformer Architecture" (Xiong et al. 2020, arXiv:2002.04745) compares the first two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from tp.config import ModelConfig
from tp.layers.norm import LayerNorm, Norm, RMSNorm
from tp.parallel.group import TensorParallelGroup

NORMS: Mapping[str, type[RMSNorm | LayerNorm]] = {"rms_norm": RMSNorm, "layer_norm": LayerNorm}
"""By `ModelConfig.norm`."""


@dataclass(frozen=True)
class NormPlacement:
    """The norms of a layer: for each of its two sublayers, the name of each norm by its place in `SublayerNorms`.

    Attributes:
        final: whether the decoder ends in a norm.
    """

    attention: Mapping[str, str]
    mlp: Mapping[str, str]
    final: bool = True


PLACEMENTS: Mapping[str, NormPlacement] = {
    "pre": NormPlacement(
        attention={"of_input": "input_layernorm"},
        mlp={"of_input": "post_attention_layernorm"},
    ),
    "post": NormPlacement(
        attention={"of_state": "post_attention_layernorm"},
        mlp={"of_state": "post_feedforward_layernorm"},
        final=False,
    ),
    "sandwich": NormPlacement(
        attention={"of_input": "input_layernorm", "of_write": "post_attention_layernorm"},
        mlp={"of_input": "pre_feedforward_layernorm", "of_write": "post_feedforward_layernorm"},
    ),
}
"""By `ModelConfig.norm_placement`; the names are those of the Hub's families."""


@dataclass(frozen=True)
class SublayerNorms:
    """The norms around one sublayer; None where there is none.

    Attributes:
        of_input: of the state that the sublayer reads.
        of_write: of what it writes, before the add.
        of_state: of the state after the add.
    """

    of_input: Norm | None = None
    of_write: Norm | None = None
    of_state: Norm | None = None


def add_norms(
    layer: nn.Module,
    names: Mapping[str, str],
    config: ModelConfig,
    group: TensorParallelGroup,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> SublayerNorms:
    """Makes the norms of one sublayer, as modules of `layer` under their names."""
    make = partial(NORMS[config.norm], config.hidden_size, config.norm_eps, group, dtype=dtype, device=device)
    norms = {place: make() for place in names}
    for place, name in names.items():
        layer.add_module(name, norms[place])
    return SublayerNorms(**norms)
