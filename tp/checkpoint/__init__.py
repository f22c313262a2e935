"""Checkpoints: safetensors, GGUF, Hub directories; each rank reads its slices, and whole tensors are written."""

from tp.checkpoint.loader import Checkpoint, LoadReport, open_checkpoint
from tp.checkpoint.memory import MemoryBudget, check_fits, weight_bytes
from tp.checkpoint.writer import save_checkpoint

__all__ = [
    "Checkpoint",
    "LoadReport",
    "MemoryBudget",
    "check_fits",
    "open_checkpoint",
    "save_checkpoint",
    "weight_bytes",
]
