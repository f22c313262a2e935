"""A tensor-parallel decoder: the same modules for prefill, decode, training and looking inside.

`import tp` needs torch alone; `tp.load` brings in what reads checkpoints and generates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tp.config import ModelConfig
from tp.models import CausalLM
from tp.parallel import TensorParallelGroup

if TYPE_CHECKING:
    from tp.generation import LanguageModel
    from tp.generation.loading import load

__version__ = "0.1.0"

__all__ = ["CausalLM", "LanguageModel", "ModelConfig", "TensorParallelGroup", "load"]


def __getattr__(name: str) -> Any:
    if name == "load":
        from tp.generation.loading import load

        return load
    if name == "LanguageModel":
        from tp.generation import LanguageModel

        return LanguageModel
    raise AttributeError(f"module 'tp' has no attribute {name!r}")
