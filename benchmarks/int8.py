"""Decode with int8 weights beside the checkpoint's own, in turns in one run, and the perplexity of a text with both.

    python -m launch run --nproc 2 benchmarks/int8.py --model DIRECTORY --text FILE [--runs 6] [--json FILE]

Both models are loaded; a request of 64 prompt tokens goes to each in turn. Times are rank 0's, medians with minimum and
maximum after a warm-up; the ratio is the median of the pairs'.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import tp
from launch.arguments import output_file
from tp.generation import GenerationOptions, score
from tp.models import prepare_for_inference
from tp.parallel import TensorParallelGroup

PROMPT = [11 + 7 * index for index in range(64)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--json", type=output_file, help="write the result to this file")
    arguments = parser.parse_args()
    group = TensorParallelGroup.from_environment(device="cpu")
    models = {"plain": tp.load(arguments.model, group), "int8": tp.load(arguments.model, group)}
    prepare_for_inference(models["int8"], "int8")
    options = GenerationOptions(max_new_tokens=arguments.new_tokens, ignore_eos=True)
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(arguments.runs + 1):
        for name, model in models.items():
            times[name].append(1e3 * model.generate([PROMPT], options).timings.tpot_s)
    text = arguments.text.read_text(encoding="utf-8")
    scores = {name: score(model, text) for name, model in models.items()}
    pairs = zip(times["plain"][1:], times["int8"][1:], strict=True)
    result = {
        "model": Path(arguments.model).name,
        "tp_size": group.size,
        "runs": arguments.runs,
        "ms_a_token": {name: [statistics.median(ms[1:]), min(ms[1:]), max(ms[1:])] for name, ms in times.items()},
        "plain_by_int8": statistics.median(plain / int8 for plain, int8 in pairs),
        "text": arguments.text.name,
        "text_tokens": len(scores["plain"].token_ids),
        "perplexity": {name: scored.perplexity for name, scored in scores.items()},
    }
    if group.rank == 0:
        print(json.dumps(result))
        if arguments.json:
            arguments.json.write_text(json.dumps(result) + "\n")
    group.close()


if __name__ == "__main__":
    main()
