"""The learning rate over a run: linear warm-up, then a cosine (Loshchilov and Hutter 2016, arXiv:1608.03983)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tp.errors import RequestError


@dataclass(frozen=True)
class CosineSchedule:
    """lr(s) = peak · (s+1)/warm-up in the warm-up, then final + (peak − final) · (1 + cos(π·progress)) / 2.

    Attributes:
        peak, final: highest and last learning rate.
        warmup_steps, total_steps: in optimiser steps.
    """

    peak: float
    final: float
    warmup_steps: int
    total_steps: int

    def __post_init__(self) -> None:
        if not 0 <= self.final <= self.peak:
            raise RequestError(f"final learning rate {self.final} is outside 0..{self.peak}, the highest")
        if not 0 <= self.warmup_steps <= self.total_steps:
            raise RequestError(f"{self.warmup_steps} warm-up steps are outside 0..{self.total_steps}, the whole run")

    def __call__(self, step: int) -> float:
        """The learning rate of step `step`, the first being 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        return self.final + (self.peak - self.final) * (1 + math.cos(math.pi * min(1.0, progress))) / 2
