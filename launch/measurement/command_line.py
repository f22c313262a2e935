"""What the measuring programs have in common: options, progress on stderr, a table or JSON, errors in a line."""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.arguments import output_file, positive, seconds
from launch.output_files import write
from tp.cores import own_cores
from tp.errors import TensorParallelError

if TYPE_CHECKING:
    from rich.console import Console

_BEGAN = time.perf_counter()
TABLE_WIDTH = 140
"""Of tables that are written to a file."""


def integers(text: str) -> list[int]:
    """Positive integers between commas."""
    return [positive(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    """Names between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def add_shared_options(parser: argparse.ArgumentParser, *, tp: str) -> None:
    """The model, the numbers, the threads, how often, and where results go.

    Args:
        tp: default of --tp.
    """
    parser.add_argument("--model", required=True, help="a directory in the Hub's layout")
    parser.add_argument("--gguf", metavar="FILE", help="the same model for llama.cpp (default: DIRECTORY.gguf)")
    parser.add_argument("--tp", type=integers, default=integers(tp), metavar="T,...", help=f"degrees (default {tp})")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=positive, default=len(own_cores()), help="in all (default: all cores)")
    parser.add_argument("--runs", type=positive, default=5, help="rounds that count (default 5)")
    parser.add_argument("--patience", type=seconds, default=600.0, metavar="S", help="seconds for a load or a request")
    parser.add_argument(
        "--json", type=_output, metavar="FILE", help="write an object to FILE (-: stdout), the table to stderr"
    )


def _output(text: str) -> str | Path:
    return text if text == "-" else output_file(text)


def tell(text: str) -> None:
    """Progress, with the seconds since the start."""
    print(f"[{time.perf_counter() - _BEGAN:7.1f} s] {text}", file=sys.stderr, flush=True)


def show(arguments: argparse.Namespace, render: Callable[[Console], None]) -> None:
    """Prints tables on stdout, or on stderr where JSON is asked for."""
    from rich.console import Console

    file = sys.stderr if arguments.json else sys.stdout
    render(Console(file=file, highlight=False, width=None if file.isatty() else TABLE_WIDTH))


def write_json(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """Writes the results with what they are results of, where --json asks for it."""
    if not arguments.json:
        return
    text = json.dumps({**_circumstances(arguments), **results}) + "\n"
    if arguments.json == "-":
        sys.stdout.write(text)
    else:
        write("--json", arguments.json, text.encode())


def reporting_errors(run: Callable[[], None]) -> int:
    """Runs; a typed error, or an interruption, becomes a line on stderr. Gives the exit status."""
    try:
        run()
    except TensorParallelError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _circumstances(arguments: argparse.Namespace) -> dict[str, Any]:
    from launch.info import gather

    machine = gather()
    return {
        "date": datetime.date.today().isoformat(),
        "model": Path(arguments.model).name,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "runs": arguments.runs,
        "machine": {name: machine[name] for name in ("cpu", "cores", "cpu_capability", "cpu_bfloat16", "platform")},
        "packages": machine["packages"],
    }
