"""What a contestant that serves is measured in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        phase: prefill is the time to the first token; decode is the time between tokens.
        new_tokens: of each sequence; 1 for prefill.
    """

    phase: Phase
    batch: int
    prompt_tokens: int
    new_tokens: int

    def __str__(self) -> str:
        return f"{self.phase}, batch {self.batch}, {self.prompt_tokens} prompt tokens"
