"""What looking inside costs: time with each set of points captured, and the memory of all hidden states.

    python benchmarks/inspection.py --model DIRECTORY [--tp 1,2] [--rounds 9] [--json FILE]

Every round serves one request (a prompt, then new tokens) in each way of capturing, beginning with another way each
time. Times are rank 0's: to the first token, and for one more token. "nothing" is the model as it is served; "nothing
again" is the same once more, and what its ratio is off 1 is noise; "nothing, steps not captured" is without decode
graphs, which no forward that something looks at is replayed from; "no points" is a capture that keeps nothing. Ratios
are medians over rounds, to "nothing" of the same round.

Memory is that of the hidden states of one forward, the L + 1 states of the stream: bytes of the storages that the cache
holds on rank 0, and by how much the resident memory of its process grew, beside (L + 1) · N · D · itemsize.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tp
from launch.arguments import output_file
from launch.measurement.interleaving import interleave
from launch.measurement.spread import Spread, paired_ratio
from tp import choice
from tp.generation import GenerationOptions, LanguageModel, decode_graphs
from tp.inspection import ActivationCache, capture
from tp.layers import SequenceSlice, Step
from tp.parallel import TensorParallelGroup

Way = Callable[[LanguageModel], contextlib.AbstractContextManager[Any]]
"""How a request is looked at: it is served inside of what this gives."""


@contextlib.contextmanager
def without_decode_graphs(_: LanguageModel) -> Iterator[None]:
    choice.disable(decode_graphs.NAME)
    try:
        yield
    finally:
        choice.disable(os.environ.get(choice.DISABLE_VARIABLE, ""))


def captured(*points: str, **options: Any) -> Way:
    return lambda model: capture(model, points, **options)


STREAM = ("embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post", "final_norm")
WAYS: dict[str, Way] = {
    "nothing": contextlib.nullcontext,
    "nothing again": contextlib.nullcontext,
    "nothing, steps not captured": without_decode_graphs,
    "no points": captured(),
    "states of the last token": captured("resid_pre", "resid_post", positions=(-1,)),
    "states": captured("resid_pre", "resid_post"),
    "writes": captured("attn_out", "mlp_out"),
    "the whole stream": captured(*STREAM),
    "z": captured("z"),
    "pattern": captured("pattern"),
    "everything": captured(*STREAM, "z", "pattern"),
}


def milliseconds(model: LanguageModel, prompt: list[int], new_tokens: int, way: Way) -> tuple[float, float]:
    """To the first token, and for one more."""
    options = GenerationOptions(max_new_tokens=new_tokens, ignore_eos=True)
    model.group.communicator.all_gather_object(None)  # start together
    with way(model):
        timings = model.generate([prompt], options).timings
    return 1e3 * timings.ttft_s, 1e3 * timings.tpot_s


def times(model: LanguageModel, prompt_tokens: int, new_tokens: int, rounds: int) -> list[dict[str, Any]]:
    prompt = [11 + 7 * index for index in range(prompt_tokens)]
    contestants = {name: partial(milliseconds, model, prompt, new_tokens, way) for name, way in WAYS.items()}
    results = interleave(contestants, rounds=rounds, warm_ups=2).results
    rows = []
    for name, measured in results.items():
        row: dict[str, Any] = {"captured": name}
        for phase, ours, plain in zip(
            ("prefill", "decode"), zip(*measured, strict=True), zip(*results["nothing"], strict=True), strict=True
        ):
            row[f"{phase}_ms"] = asdict(Spread.of(ours))
            row[f"{phase}_by_nothing"] = paired_ratio(ours, plain)
        rows.append(row)
    return rows


@torch.no_grad()
def hidden_states(model: LanguageModel, num_tokens: int, *, sharded: bool) -> tuple[ActivationCache, int]:
    """The cache of one forward, and by how many bytes the process has grown."""
    step = Step(torch.arange(num_tokens), (SequenceSlice(num_tokens),))
    model.residual_stream(step).settle()
    before = resident_bytes()
    with capture(model, ("resid_pre", "resid_post"), sharded=sharded) as cache:
        model.residual_stream(step).settle()
    return cache, resident_bytes() - before


def memory(model: LanguageModel, num_tokens: int) -> dict[str, Any]:
    config = model.config
    row: dict[str, Any] = {
        "tokens": num_tokens,
        "formula_bytes": (config.num_layers + 1) * num_tokens * config.hidden_size * model.dtype.itemsize,
    }
    for name, sharded in (("whole", False), ("sharded", True)):
        cache, growth = hidden_states(model, num_tokens, sharded=sharded)
        storages = {value.untyped_storage().data_ptr(): value for of in cache.forwards for value in of.values.values()}
        row[f"{name}_bytes"] = sum(value.untyped_storage().nbytes() for value in storages.values())
        row[f"{name}_resident_growth_bytes"] = growth
    return row


def resident_bytes() -> int:
    """Of this process, once what it has freed is given back."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(arguments: argparse.Namespace) -> None:
    """On one rank."""
    group = TensorParallelGroup.from_environment(device="cpu")
    model = tp.load(arguments.model, group)
    result = {
        "tp_size": group.size,
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": arguments.new_tokens,
        "rounds": arguments.rounds,
        "times": times(model, arguments.prompt_tokens, arguments.new_tokens, arguments.rounds),
        "memory": [memory(model, num_tokens) for num_tokens in (256, 1024)],
    }
    if group.rank == 0:
        print(json.dumps(result))
    group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tp", default="1,2", help="degrees, one after the other")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=output_file, help="write the result to this file")
    arguments = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        measure(arguments)
        return
    runs = []
    for tp_size in arguments.tp.split(","):
        command = [sys.executable, "-m", "launch", "run", "--nproc", tp_size, __file__, *sys.argv[1:]]
        finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        runs.append(json.loads(finished.stdout.strip().splitlines()[-1]))
        print(table(runs[-1]))
    if arguments.json:
        arguments.json.write_text(json.dumps({"model": Path(arguments.model).name, "runs": runs}) + "\n")


def table(run: dict[str, Any]) -> str:
    lines = [f"t = {run['tp_size']}                        prefill ms  ratio   decode ms  ratio"]
    for row in run["times"]:
        prefill, decode = (
            f"{row[f'{p}_ms']['median']:8.2f} {row[f'{p}_by_nothing']:8.3f}" for p in ("prefill", "decode")
        )
        lines.append(f"{row['captured']:<28} {prefill}    {decode}")
    for row in run["memory"]:
        lines.append(
            f"{row['tokens']:>5} tokens: formula {row['formula_bytes']:>12,} B, held {row['whole_bytes']:>12,} B, "
            f"resident +{row['whole_resident_growth_bytes']:>12,} B, held of a shard {row['sharded_bytes']:>12,} B"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
