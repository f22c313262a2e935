"""From process start to the first token: this project beside peers, each started anew in every round.

    python benchmarks/start.py --model DIRECTORY --tp 2 [--compare vllm] [--json FILE]

Each start that counts follows one that does not, which brings files into the page cache and fills the caches that
systems keep of what they compile. docs/benchmarks.md says more.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

from launch.measurement.command_line import (
    add_shared_options,
    names,
    reporting_errors,
    show,
    tell,
    write_json,
)
from launch.measurement.interleaving import Turn, interleave
from launch.measurement.lineup import lineup
from launch.measurement.model_facts import model_facts
from launch.measurement.peers.task import Task
from launch.measurement.requests import random_request
from launch.measurement.start_table import print_starts, start_fields
from launch.measurement.starting import seconds_to_first_token
from launch.process_guard import ProcessGuard


def main() -> int:
    """Measures and reports."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shared_options(made, tp="2")
    made.add_argument("--compare", type=names, default=[], help="peers: transformers, vllm, llama_cpp")
    made.add_argument("--prompt-tokens", type=int, default=64, help="default 64")
    arguments = made.parse_args()
    return reporting_errors(lambda: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    """What the command line asks for."""
    task = Task(arguments.model, arguments.dtype, 1, arguments.prompt_tokens + 1, arguments.gguf)
    contestants = lineup(task, arguments.tp, arguments.compare, arguments.threads)
    facts = model_facts(arguments.model, arguments.dtype)
    request = random_request(1, arguments.prompt_tokens, 1, facts.vocab_size)
    with ProcessGuard() as guard:
        actions = {
            contestant.name: partial(seconds_to_first_token, contestant, request, guard, arguments.patience)
            for contestant in contestants
        }
        rounds = interleave(actions, rounds=arguments.runs, warm_ups=0, watch=report_turn)
    show(arguments, lambda console: print_starts(console, rounds))
    write_json(arguments, start_fields(rounds))


def report_turn(turn: Turn[float]) -> None:
    """Progress."""
    tell(f"round {turn.round} of {turn.rounds}: {turn.contestant}: {turn.result:.2f} s")


if __name__ == "__main__":
    sys.exit(main())
