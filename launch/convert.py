"""`convert`: any checkpoint that can be read to a Hub directory, re-typed and re-sharded."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

from launch.arguments import check_model, place, positive
from launch.terminal import Terminal
from tp.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    from tp.checkpoint import Checkpoint

DESCRIPTION = "Writes a checkpoint as a Hub directory that transformers opens, a few MiB in memory at a time."


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser("convert", help="write a checkpoint as a Hub directory", description=DESCRIPTION)
    parser.add_argument("--model", required=True, help="a directory in the Hub's layout, a Hub id, or a .gguf file")
    parser.add_argument("--output", type=place, required=True, metavar="DIR", help="must not exist, or be empty")
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="auto: the checkpoint's own, bfloat16 for GGUF (default)",
    )
    parser.add_argument("--max-shard-size", type=positive, default=5 * 10**9, metavar="BYTES", help="of a file (5e9)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else there")
    parser.add_argument("--debug", action="store_true", help="tracebacks of all errors")
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Converts, in this process."""
    check_model(arguments.model, None)
    output = arguments.output
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise RequestError(f"--output {output} exists and is not an empty directory: choose another")
    with Terminal.of_command(json=arguments.json) as terminal:
        _convert(arguments, terminal)
    return 0


def _convert(arguments: argparse.Namespace, terminal: Terminal) -> None:
    import torch

    from tp.checkpoint import open_checkpoint
    from tp.checkpoint.convert import convert_checkpoint
    from tp.parallel.group import TensorParallelGroup

    began = time.perf_counter()
    with closing(open_checkpoint(arguments.model, TensorParallelGroup.alone())) as checkpoint:
        dtype = checkpoint.default_dtype if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
        with terminal.progress("converting") as progress:
            convert_checkpoint(
                checkpoint,
                arguments.output,
                dtype,
                _tokenizer(checkpoint, terminal),
                max_shard_bytes=arguments.max_shard_size,
                progress=progress,
            )
    files = sorted(arguments.output.glob("*.safetensors"))
    summary = {
        "output": str(arguments.output),
        "dtype": str(dtype).removeprefix("torch."),
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "seconds": time.perf_counter() - began,
    }
    if arguments.json:
        terminal.show(json.dumps(summary) + "\n")
    else:
        terminal.console.print(
            f"{arguments.output}: {summary['bytes'] / 1e6:,.1f} MB of {summary['dtype']} in {len(files)} "
            f"file{'s' if len(files) > 1 else ''}",
            soft_wrap=True,
            markup=False,
        )


def _tokenizer(checkpoint: Checkpoint, terminal: Terminal) -> Any:
    """The checkpoint's tokenizer; None, said so, where it has none."""
    try:
        return checkpoint.tokenizer()
    except CheckpointError as error:
        terminal.console.print(f"without a tokenizer: {error}", soft_wrap=True, markup=False)
        return None
