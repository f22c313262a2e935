"""GGUF's names of tensors, and the Hub's."""

from __future__ import annotations

import re
from collections.abc import Mapping

_WHOLE_MODEL: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_PER_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>0|[1-9][0-9]{0,8})\.)?(?P<stem>[a-z_]+)\.(?P<kind>weight|bias)")


def hub_name(gguf_name: str) -> str | None:
    """The Hub's name of a GGUF tensor, if it has one: "model.layers.3.self_attn.q_proj.bias" of "blk.3.attn_q.bias"."""
    match = _NAME.fullmatch(gguf_name)
    if match is None:
        return None
    layer, stem, kind = match["layer"], match["stem"], match["kind"]
    if layer is None:
        return f"{_WHOLE_MODEL[stem]}.{kind}" if stem in _WHOLE_MODEL else None
    return f"model.layers.{layer}.{_PER_LAYER[stem]}.{kind}" if stem in _PER_LAYER else None
