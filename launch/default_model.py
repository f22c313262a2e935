"""What runs where no model is named: SmolLM2 where it can be had, else a small model that the program carries."""

from __future__ import annotations

import tempfile
from pathlib import Path

from launch import demo_checkpoint

EMBEDDED = Path(__file__).with_name("embedded_model")
"""A Hub directory: a model of 2.6 M parameters, trained on the King James Bible by `benchmarks/king_james.sh`."""
EMBEDDED_PROMPT = "And it came to pass"


def kept_or_embedded() -> Path:
    """SmolLM2's file where it was fetched before, else the embedded model; the same for all ranks of a machine."""
    kept = demo_checkpoint.kept_path()
    return kept if kept.is_file() else EMBEDDED


def fetched_or_embedded() -> Path:
    """SmolLM2's file, fetched with progress where it is not kept yet; the embedded model, with a word, where it cannot.

    To be asked once, before ranks are started.
    """
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    kept = kept_or_embedded()
    if kept != EMBEDDED:
        return kept
    kept = demo_checkpoint.kept_path()
    try:
        with tempfile.TemporaryDirectory(prefix="tp-decoder-") as scratch:
            fetched = demo_checkpoint.obtain_with_progress(Path(scratch), console)
            if fetched == kept:
                return kept
        reason: object = f"{kept.parent} cannot be written"  # what lay in the scratch directory is gone
    except demo_checkpoint.UnavailableError as error:
        reason = error
    console.print(
        f"{demo_checkpoint.NAME} could not be fetched ({reason}): the embedded model runs; --model names another.",
        soft_wrap=True,
        markup=False,
    )
    return EMBEDDED
