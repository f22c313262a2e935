"""What must be equal on all ranks of a model, in words, so that ranks can compare it."""

from __future__ import annotations

from tp.choice import disabled
from tp.models.causal_lm import CausalLM
from tp.parallel.agreement import statement_of


def statement_of_model(model: CausalLM) -> dict[str, str]:
    """For `tp.parallel.agreement`: sizes, dtype, kind of weights, layout, taps, and the kernels switched off.

    Ranks that differ in any of them compute different things, or enter different collectives.
    """
    decoder = model.model
    return {
        **statement_of("config", model.config),
        "dtype": str(model.dtype),
        "weights": type(model.lm_head.weight).__name__,
        "layout rule": getattr(decoder.choose_layout, "__qualname__", type(decoder.choose_layout).__name__),
        "tap": "none" if decoder.tap is None else type(decoder.tap).__name__,
        "operations switched off": ", ".join(sorted(disabled())) or "none",
    }
