"""Generation: prompts in, sequences out, the same on every rank."""

from tp.generation.language_model import LanguageModel
from tp.generation.options import GenerationOptions, SamplingParameters
from tp.generation.results import (
    FinishReason,
    GeneratedSequence,
    GenerationResult,
    Timings,
    TokenEvent,
)
from tp.generation.scoring import Score, score
from tp.generation.stream import TokenStream

__all__ = [
    "FinishReason",
    "GeneratedSequence",
    "GenerationOptions",
    "GenerationResult",
    "LanguageModel",
    "SamplingParameters",
    "Score",
    "Timings",
    "TokenEvent",
    "TokenStream",
    "score",
]
