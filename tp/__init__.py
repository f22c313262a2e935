"""A tensor-parallel decoder: the same modules for prefill, decode, training and looking inside.

Names are imported when they are asked for: `import tp` costs nothing, building a model needs torch alone, and
`tp.load` brings in what reads checkpoints and generates.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tp.config import ModelConfig
    from tp.generation import LanguageModel
    from tp.generation.loading import load
    from tp.models import CausalLM
    from tp.parallel import TensorParallelGroup

__version__ = "0.1.0"

__all__ = ["CausalLM", "LanguageModel", "ModelConfig", "TensorParallelGroup", "load"]

_HOMES = {
    "CausalLM": "tp.models",
    "LanguageModel": "tp.generation",
    "ModelConfig": "tp.config",
    "TensorParallelGroup": "tp.parallel",
    "load": "tp.generation.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tp' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
