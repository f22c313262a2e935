"""Norms of the stream of trained models, layer by layer, on a real text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.norm_placement_parts.training import TEXT
from tp.generation.loading import load
from tp.inspection import capture
from tp.parallel import TensorParallelGroup
from tp.training.data import PlainText, read_documents

TITLE = "Ruth 1"
NUM_TOKENS = 256


@torch.no_grad()
def measure(directory: Path, group: TensorParallelGroup) -> dict[str, Any]:
    """‖x‖ after the embedding and after each layer: of the first token, and mean and quantiles of all others."""
    model = load(str(directory), group, torch.float32)
    texts = (document.text for document in read_documents([TEXT]) if isinstance(document, PlainText))
    text = next(text for text in texts if text.startswith(f"{TITLE}\n"))
    ids = torch.tensor([model.tokenizer(text)["input_ids"][:NUM_TOKENS]])
    with capture(model, ["embed", "resid_post"]) as cache:
        model(ids)
    states = [cache["embed"], *(cache["resid_post", layer] for layer in range(model.config.num_layers))]
    return {
        "hidden_size": model.config.hidden_size,
        "tokens": ids.shape[1],
        "text": TITLE,
        "layers": [_norms(state_ND.norm(dim=-1)) for state_ND in states],
    }


def _norms(of_tokens: Tensor) -> dict[str, float]:
    others = of_tokens[1:]
    low, median, high = others.quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
    return {
        "first": of_tokens[0].item(), "mean": others.mean().item(), "low": low, "median": median, "high": high,
    }  # fmt: skip
