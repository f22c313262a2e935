"""What every system is told when it is started, as options of its module's command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """The model and the room that requests take.

    Attributes:
        model: directory in the Hub's layout, or a GGUF file; for this project's engine also what
            `launch.measurement.model_facts.text_of_config` gives, to be filled with random weights.
        dtype: of weights and computation, by torch's name.
        most_sequences: prompts of the largest batch.
        most_tokens: tokens of the longest sequence, new ones included.
        gguf: a GGUF file of the same model, for systems that take nothing else; None: look beside the directory.
        device, backend: as --device and --backend of the commands; for this project's engine alone.
    """

    model: str
    dtype: str
    most_sequences: int
    most_tokens: int
    gguf: str | None = None
    device: str = "cpu"
    backend: str = "auto"

    def options(self, processes: int, threads: int) -> list[str]:
        """The command line of a system's module."""
        given = {
            "--model": self.model,
            "--dtype": self.dtype,
            "--most-sequences": self.most_sequences,
            "--most-tokens": self.most_tokens,
            "--processes": processes,
            "--threads": threads,
            "--device": self.device,
            "--backend": self.backend,
        }
        return [text for name, value in given.items() for text in (name, str(value))]


def arguments_of_module() -> argparse.Namespace:
    """The options, in the process that serves; each attribute is named as its option."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    for name in ("--most-sequences", "--most-tokens", "--processes", "--threads"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--device", "--backend"):
        parser.add_argument(name, required=True)
    return parser.parse_args()
