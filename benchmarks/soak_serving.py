"""Thousands of mixed requests through one loaded model: nothing leaks, and no token is another than at t = 1.

    python -m launch run --nproc 2 -m benchmarks.soak_serving [--requests 10000] [--model DIRECTORY] [--json FILE]

Each request has its own prompts, lengths, sampling and stops; a tenth of them is cancelled after some tokens. Every
fiftieth that is not cancelled is repeated on rank 0 alone. Memory, file descriptors and shared memory are read from
/proc on every rank while the requests go on; the first quarter, in which caches fill, is not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tp
from launch.arguments import output_file, positive
from launch.measurement.command_line import tell
from tp.errors import NumericalError
from tp.generation import GenerationOptions, SamplingParameters
from tp.parallel import TensorParallelGroup

MODEL = Path(__file__).resolve().parents[1] / "launch" / "embedded_model"
CANCELLED, COMPARED, SAMPLED = 10, 50, 100
"""One request in so many is cancelled, repeated at t = 1, and followed by a look at what the process holds."""
MOST_GROWTH = {"resident": 8 << 20, "shared": 1 << 20, "files": 0}
"""Of what a rank holds over three quarters of the requests: the allocator's pools, and pages of the shared segment that
only the largest messages touch."""


@dataclass(frozen=True)
class Held:
    """What a process holds: resident bytes, those of them that are shared, open files."""

    resident: int
    shared: int
    files: int

    @classmethod
    def now(cls) -> Held:
        """Of this process."""
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        resident, shared = (int(status[name].split()[0]) << 10 for name in ("VmRSS", "RssShmem"))
        return cls(resident, shared, len(os.listdir("/proc/self/fd")))


@dataclass(frozen=True)
class Asked:
    """A request, and after how many tokens it is cancelled, if it is."""

    prompts: list[list[int]]
    options: GenerationOptions
    cancelled_after: int | None


def request(index: int, vocab_size: int) -> Asked:
    """The same on every rank."""
    draw = random.Random(index)
    prompts = [
        [draw.randrange(5, vocab_size) for _ in range(draw.choice([1, 2, 7, 16, 33, 70]))]
        for _ in range(draw.choice([1, 1, 1, 2, 3, 5]))
    ]
    greedy = draw.random() < 0.5
    sampling = SamplingParameters() if greedy else SamplingParameters(temperature=0.9, top_k=20, seed=index)
    options = GenerationOptions(
        draw.randint(1, 24),
        stop=("the",) if draw.random() < 0.3 else (),
        ignore_eos=draw.random() < 0.5,
        sampling=sampling,
        prefill_chunk=draw.choice([5, 64, 512]),
    )
    return Asked(prompts, options, draw.randint(1, 6) if index % CANCELLED == CANCELLED - 1 else None)


def serve(model: Any, asked: Asked, group: TensorParallelGroup) -> list[list[int]] | None:
    """The new ids of each sequence; None of a request that was cancelled."""
    if asked.cancelled_after is None:
        return [sequence.new_ids for sequence in model.generate(asked.prompts, asked.options).sequences]
    with model.generate_stream(asked.prompts, asked.options) as stream:
        for count, _ in enumerate(stream, 1):
            if group.rank == 0 and count >= asked.cancelled_after:
                break
    return None


def soak(group: TensorParallelGroup, directory: str, requests: int) -> dict[str, Any]:
    """Serves them all; what was seen, on every rank.

    Raises:
        NumericalError: a request gave other tokens than at t = 1.
    """
    model = tp.load(directory, group, dtype="float32")
    alone = tp.load(directory, TensorParallelGroup.alone(), dtype="float32") if group.rank == 0 else None
    held: list[Held] = []
    counts: Counter[str] = Counter()
    began = time.perf_counter()
    for index in range(requests):
        asked = request(index, model.config.vocab_size)
        new_ids = serve(model, asked, group)
        counts["cancelled" if new_ids is None else "served"] += 1
        counts["tokens"] += sum(map(len, new_ids or []))
        if alone is not None and new_ids is not None and index % COMPARED == 0:
            expected = serve(alone, asked, alone.group)
            counts["compared"] += 1
            if expected != new_ids:
                raise NumericalError(f"request {index} gave {new_ids}, and at t = 1 {expected}")
        if (index + 1) % SAMPLED == 0 or index + 1 == requests:
            held.append(Held.now())
            if group.rank == 0 and (index + 1) % (10 * SAMPLED) == 0:
                tell(f"{index + 1:,} requests, {held[-1].resident / 1e6:.1f} MB, {held[-1].files} files")
    of_ranks = group.communicator.all_gather_object([vars(each) for each in held])
    return {
        "requests": requests,
        "tp_size": group.size,
        **counts,
        "seconds": time.perf_counter() - began,
        "ranks": [summary([Held(**each) for each in rank]) for rank in of_ranks],
        "held": of_ranks,
    }


def summary(held: list[Held]) -> dict[str, int]:
    """After a quarter of the requests, and how much more at the end."""
    early, late = held[len(held) // 4], held[-1]
    return {name: vars(early)[name] for name in vars(early)} | {
        f"{name}_growth": vars(late)[name] - vars(early)[name] for name in vars(early)
    }


def leaks(seen: dict[str, Any]) -> list[str]:
    """What grew on which rank."""
    return [
        f"rank {rank}: {name} grew by {of_rank[f'{name}_growth']:,}"
        for rank, of_rank in enumerate(seen["ranks"])
        for name, most in MOST_GROWTH.items()
        if of_rank[f"{name}_growth"] > most
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=positive, default=10_000)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--json", type=output_file, metavar="FILE")
    arguments = parser.parse_args()
    group = TensorParallelGroup.from_environment(device="cpu")
    seen = soak(group, arguments.model, arguments.requests)
    found = leaks(seen)
    if group.rank == 0:
        if arguments.json:
            arguments.json.write_text(json.dumps(seen) + "\n", encoding="utf-8")
        shown = {name: value for name, value in seen.items() if name != "held"}
        print(json.dumps(shown, indent=1), *found, sep="\n")
    group.close()
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
