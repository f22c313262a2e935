"""Prefill with the stream replicated and sharded, by number of tokens: where sequence parallelism begins to pay.

    python -m launch run --nproc 2 benchmarks/sequence_parallel.py [--tokens 64,256,1024,4096] [--json FILE]

Random weights of SmolLM2-135M's shape with fewer layers. The two layouts alternate within one run; times are medians
over runs after a warm-up, on rank 0; the ratio is the median of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from launch.arguments import output_file
from tp.config import ModelConfig
from tp.layers import KVCache, Layout, Replicate, SequenceSlice, ShardTokens, Step
from tp.models import CausalLM, initialise_parameters
from tp.parallel import TensorParallelGroup
from tp.rope_config import RopeConfig

CONFIG = ModelConfig(
    model_type="llama", hidden_size=576, num_layers=6, num_attention_heads=9, num_kv_heads=3, head_dim=64,
    intermediate_size=1536, vocab_size=49152, max_position_embeddings=8192, rope=RopeConfig(),
    tie_word_embeddings=True,
)  # fmt: skip


@torch.inference_mode()
def prefill_seconds(model: CausalLM, layout: type[Layout], num_tokens: int, cache: KVCache) -> float:
    model.model.choose_layout = layout
    step = Step(torch.zeros(num_tokens, dtype=torch.long), (SequenceSlice(num_tokens),))
    model.group.communicator.all_gather_object(None)  # start together
    began = time.perf_counter()
    model.next_token_logits(step, cache)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="64,256,1024,4096")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", type=output_file, help="write the rows to this file, one a line")
    arguments = parser.parse_args()
    group = TensorParallelGroup.from_environment(device="cpu")
    model = CausalLM(CONFIG, group, dtype=torch.float32)
    initialise_parameters(model, seed=0)
    for num_tokens in map(int, arguments.tokens.split(",")):
        cache = KVCache(CONFIG, group, 1, num_tokens, dtype=torch.float32)
        times: dict[str, list[float]] = {"Replicate": [], "ShardTokens": []}
        for _ in range(arguments.runs + 1):
            for layout in (Replicate, ShardTokens):
                times[layout.__name__].append(prefill_seconds(model, layout, num_tokens, cache))
        replicated, sharded = times["Replicate"][1:], times["ShardTokens"][1:]
        row = {
            "tp_size": group.size, "tokens": num_tokens, "runs": arguments.runs,
            "replicate_ms": 1e3 * statistics.median(replicated), "shard_ms": 1e3 * statistics.median(sharded),
            "ratio": statistics.median(r / s for r, s in zip(replicated, sharded, strict=True)),
        }  # fmt: skip
        if group.rank == 0:
            print(
                f"t={group.size} {num_tokens:>5} tokens: replicate {row['replicate_ms']:8.1f} ms, "
                f"shard {row['shard_ms']:8.1f} ms, replicate / shard {row['ratio']:.3f}"
            )
            if arguments.json:
                with arguments.json.open("a") as out:
                    out.write(json.dumps(row) + "\n")
    group.close()


if __name__ == "__main__":
    main()
