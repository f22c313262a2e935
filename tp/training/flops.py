"""Floating-point operations of a training step, and the share of a device's peak that they reach."""

from __future__ import annotations

import torch

from tp.config import ModelConfig

# Dense bfloat16 peaks in FLOP/s, from NVIDIA's data sheets (without sparsity).
BFLOAT16_PEAKS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}


def training_flops_per_token(config: ModelConfig, context: int) -> float:
    """Forward and backward: 6 a matmul weight, and 6 · heads · head_dim · context a layer for causal attention.

    A causal token attends to half of the context on average: 2 · 2 · heads · head_dim · context / 2 forward, twice
    that backward. Recomputation is not counted (Chowdhery et al. 2022, appendix B: model FLOPs, not hardware FLOPs).
    """
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_kv_heads, config.head_dim
    attention = config.hidden_size * head_dim * (2 * heads + 2 * kv_heads)
    mlp = (3 if config.gated_mlp else 2) * config.hidden_size * config.intermediate_size
    weights = config.num_layers * (attention + mlp) + config.vocab_size * config.hidden_size
    return 6.0 * weights + 6.0 * config.num_layers * heads * head_dim * context


def peak_flops(device: torch.device) -> float | None:
    """The device's bfloat16 peak, where it is known; None for CPUs and other devices."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in BFLOAT16_PEAKS.items() if known in name), None)
