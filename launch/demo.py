"""`demo`: a small chat model on two ranks, fetched first; where it cannot be fetched, the embedded one."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from launch import demo_checkpoint
from launch.default_model import EMBEDDED, EMBEDDED_PROMPT
from launch.ranks import own_command

RANKS = 2
PROMPT = "Explain in three sentences why the sky is blue."
NEW_TOKENS = 96


def add_parser(commands: Any) -> None:
    """Adds the command; it has no options."""
    parser = commands.add_parser("demo", help="run a small chat model on two ranks", description=__doc__)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Gets a model, shows the command that runs it, runs it, and returns its exit status."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="tp-decoder-demo-") as directory:
        try:
            request = _fetched_model_request(Path(directory), console)
        except demo_checkpoint.UnavailableError as error:
            console.print(_unavailable(error), soft_wrap=True, markup=False)
            request = _request(EMBEDDED, "--prompt", EMBEDDED_PROMPT)
        console.print(f"$ {_command()} {shlex.join(request)}", style="dim", soft_wrap=True, markup=False)
        return subprocess.call([sys.executable, *own_command(request)])


def _fetched_model_request(directory: Path, console: Any) -> list[str]:
    model = demo_checkpoint.obtain_with_progress(directory, console)
    return _request(model, "--chat", "--prompt", PROMPT)


def _request(model: Path, *prompt: str) -> list[str]:
    size = ["--tp", str(RANKS), "--max-new-tokens", str(NEW_TOKENS)]
    return ["generate", "--model", str(model), *prompt, *size, *_sharing_a_gpu()]


def _sharing_a_gpu() -> list[str]:
    """NCCL takes one rank a GPU; on a machine with a single one the two ranks share it over gloo."""
    import torch

    return ["--backend", "gloo"] if 0 < torch.cuda.device_count() < RANKS else []


def _unavailable(error: Exception) -> str:
    return (
        f"{demo_checkpoint.NAME} could not be fetched ({error}).\n"
        f"To run a model that you have: {_command()} generate --tp {RANKS} --prompt TEXT --model M, where M is a "
        "directory in the Hub's layout, a Hub id or a .gguf file.\n"
        "Meanwhile, the small model that this program carries, which has read nothing but the Bible."
    )


def _command() -> str:
    """How to call this program again, whether or not its environment is activated."""
    interpreter = os.path.relpath(sys.executable)
    return f"{sys.executable if interpreter.startswith('..') else interpreter} -m launch"
