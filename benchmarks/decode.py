"""Prefill and decode on CPUs: this project at each degree, beside peers that run in the same rounds.

    python benchmarks/decode.py --model DIRECTORY --tp 1,2 [--compare transformers,vllm,llama_cpp] [--json FILE]

Every contestant is loaded once in processes of its own and is stopped while others are measured; all have the same
prompts, dtype and number of threads in all. docs/benchmarks.md says what the columns mean. `make peers` installs them.
"""

from __future__ import annotations

import argparse
import sys

from launch.measurement.cases import Case
from launch.measurement.command_line import (
    add_shared_options,
    integers,
    names,
    reporting_errors,
    show,
    tell,
    write_json,
)
from launch.measurement.decoding import compare
from launch.measurement.lineup import lineup
from launch.measurement.model_facts import model_facts
from launch.measurement.peers.task import Task
from launch.measurement.tables import comparison_fields, print_comparison
from tp.errors import RequestError


def main() -> int:
    """Measures and reports."""
    arguments = parser().parse_args()
    return reporting_errors(lambda: run(arguments))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shared_options(made, tp="1,2")
    made.add_argument("--compare", type=names, default=[], help="peers: transformers, vllm, llama_cpp")
    made.add_argument("--batch", type=integers, default=[1, 8], help="sequences of decode (default 1,8)")
    made.add_argument("--prompt-tokens", type=integers, default=[64, 2048], help="of decode (default 64,2048)")
    made.add_argument("--new-tokens", type=int, default=64, help="of each sequence in decode (default 64)")
    made.add_argument("--prefill-tokens", type=integers, default=[512], help="of prefill, batch 1 (default 512)")
    return made


def run(arguments: argparse.Namespace) -> None:
    """What the command line asks for."""
    cases = chosen_cases(arguments)
    task = Task(
        arguments.model,
        arguments.dtype,
        most_sequences=max(case.batch for case in cases),
        most_tokens=max(case.prompt_tokens + case.new_tokens for case in cases),
        gguf=arguments.gguf,
    )
    contestants = lineup(task, arguments.tp, arguments.compare, arguments.threads)
    facts = model_facts(arguments.model, arguments.dtype)
    comparison = compare(contestants, cases, facts, rounds=arguments.runs, timeout_s=arguments.patience, watch=tell)
    show(arguments, lambda console: print_comparison(console, comparison))
    write_json(arguments, {"step_bytes": facts.step_bytes, **comparison_fields(comparison)})


def chosen_cases(arguments: argparse.Namespace) -> list[Case]:
    """Prefill by number of tokens, then decode by prompt and batch.

    Raises:
        RequestError: decode of a single token.
    """
    if arguments.new_tokens < 2:
        raise RequestError(f"--new-tokens {arguments.new_tokens} leaves no time between tokens: give at least 2")
    prefill = [Case("prefill", 1, tokens, 1) for tokens in arguments.prefill_tokens]
    decode = [
        Case("decode", batch, tokens, arguments.new_tokens)
        for tokens in arguments.prompt_tokens
        for batch in arguments.batch
    ]
    return prefill + decode


if __name__ == "__main__":
    sys.exit(main())
