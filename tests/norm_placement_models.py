"""A plain, unsharded decoder for every norm placement, written from the equations, and its configurations.

    pre       h = x + Attention(Norm(x));        y = h + MLP(Norm(h)); a last norm before the LM head
    post      h = Norm(x + Attention(x));        y = Norm(h + MLP(h))
    sandwich  h = x + Norm(Attention(Norm(x)));  y = h + Norm(MLP(Norm(h))); a last norm before the LM head

Its parameters have the names that a checkpoint has.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

PLACEMENTS = ("pre", "post", "sandwich")
NORMS = ("rms_norm", "layer_norm")
ACTIVATIONS = {"gelu": functional.gelu, "relu": functional.relu, "silu": functional.silu}
COMBINATIONS = list(itertools.product(PLACEMENTS, NORMS, (True, False)))
"""(norm_placement, norm, gated_mlp)"""


def placement_config(placement: str, norm: str, gated: bool, **overrides: Any) -> dict[str, Any]:
    """The content of a config.json of a tiny model whose sizes all differ; the plain MLP's activation is GELU."""
    return {
        "model_type": "tp_decoder",
        "norm_placement": placement,
        "norm": norm,
        "gated_mlp": gated,
        "hidden_act": "silu" if gated else "gelu",
        "hidden_size": 42,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 75,
        "vocab_size": 97,
        "max_position_embeddings": 128,
        "rope_theta": 3000.0,
        "rms_norm_eps": 1e-4,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "eos_token_id": None,
    } | overrides


class ReferenceRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


class ReferenceAttention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, bias = config["hidden_size"], config["attention_bias"]
        self.head_dim, self.theta = config["head_dim"], config["rope_theta"]
        self.queries_per_kv_head = config["num_attention_heads"] // config["num_key_value_heads"]
        width, kv_width = (config[f"num_{kind}_heads"] * self.head_dim for kind in ("attention", "key_value"))
        self.q_proj = nn.Linear(size, width, bias=bias)
        self.k_proj = nn.Linear(size, kv_width, bias=bias)
        self.v_proj = nn.Linear(size, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[S, D] → [S, D]"""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self._rotated(q), self._rotated(k)
        k, v = (kv.repeat_interleave(self.queries_per_kv_head, dim=1) for kv in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.head_dim**0.5
        visible = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return self.o_proj(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))

    def _rotated(self, x: Tensor) -> Tensor:
        """Angles, cosines and sines in float32, whatever the dtype of x, as transformers has them."""
        frequencies = 1 / self.theta ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angles = torch.arange(len(x)).unsqueeze(-1) * frequencies
        cos, sin = (function(angles).to(x.dtype).unsqueeze(1) for function in (torch.cos, torch.sin))
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class ReferenceMLP(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, width, bias = config["hidden_size"], config["intermediate_size"], config["mlp_bias"]
        self.activation = ACTIVATIONS[config["hidden_act"]]
        self.gate_proj = nn.Linear(size, width, bias=bias) if config["gated_mlp"] else None
        self.up_proj = nn.Linear(size, width, bias=bias)
        self.down_proj = nn.Linear(width, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x)))
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class ReferenceLayer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.placement = config["norm_placement"]
        self.self_attn, self.mlp = ReferenceAttention(config), ReferenceMLP(config)
        names = {
            "pre": ("input_layernorm", "post_attention_layernorm"),
            "post": ("post_attention_layernorm", "post_feedforward_layernorm"),
            "sandwich": (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ),
        }
        for name in names[self.placement]:
            self.add_module(name, reference_norm(config))

    def forward(self, x: Tensor) -> Tensor:
        if self.placement == "pre":
            h = x + self.self_attn(self.input_layernorm(x))
            return h + self.mlp(self.post_attention_layernorm(h))
        if self.placement == "post":
            h = self.post_attention_layernorm(x + self.self_attn(x))
            return self.post_feedforward_layernorm(h + self.mlp(h))
        h = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x)))
        return h + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(h)))


class ReferenceDecoder(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(ReferenceLayer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.Identity() if config["norm_placement"] == "post" else reference_norm(config)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class ReferenceModel(nn.Module):
    """Token ids [S] → logits [S, V]; parameters under the Hub's names."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.model = ReferenceDecoder(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.model(ids))

    def greedy(self, prompt: list[int], count: int) -> tuple[int, ...]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self(torch.tensor(ids))[-1].argmax()))
        return tuple(ids[len(prompt) :])


def reference_norm(config: dict[str, Any]) -> nn.Module:
    kind = nn.LayerNorm if config["norm"] == "layer_norm" else ReferenceRMSNorm
    return kind(config["hidden_size"], config["rms_norm_eps"])


@torch.no_grad()
def reference_model(config: dict[str, Any], seed: int = 0) -> ReferenceModel:
    """With every parameter drawn at random: norm weights around 1, biases far from 0."""
    model = ReferenceModel(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            parameter.copy_(1 + 0.3 * noise)
        elif name.endswith("bias"):
            parameter.copy_(0.5 * noise)
        else:
            parameter.copy_(noise * (1.0 if "embed" in name else 1.3 * parameter.shape[1] ** -0.5))
    return model
