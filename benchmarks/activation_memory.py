"""Bytes that a decoder layer keeps for the backward: measured beside derived, in both layouts.

    python -m launch run --nproc 2 benchmarks/activation_memory.py [--tokens 1024] [--json FILE]

Measured is every storage that autograd holds when a layer's forward is done, parameters apart: one layer more than
a model of one layer keeps, so that what all layers share (cos, sin, the embedding) does not count.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from launch.arguments import output_file
from tp.config import ModelConfig
from tp.layers import Layout, Replicate, SequenceSlice, ShardTokens, Step
from tp.models import CausalLM, initialise_parameters
from tp.parallel import TensorParallelGroup
from tp.planning.activations import layer_activations
from tp.rope_config import RopeConfig

CONFIG = ModelConfig(
    model_type="qwen2", hidden_size=512, num_layers=1, num_attention_heads=8, num_kv_heads=2, head_dim=64,
    intermediate_size=1408, vocab_size=1000, max_position_embeddings=8192, rope=RopeConfig(), qkv_bias=True,
)  # fmt: skip


def saved_bytes(model: CausalLM, step: Step) -> int:
    """Bytes of the distinct storages that the graph of the settled stream holds, parameters apart."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            held[tensor.untyped_storage().data_ptr()] = tensor  # kept alive, so that no address is used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(step).settle()
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def measured_layer_bytes(
    config: ModelConfig, group: TensorParallelGroup, layout: type[Layout], num_tokens: int, dtype: torch.dtype
) -> int:
    """What a second layer adds to what one layer keeps."""
    totals = []
    for num_layers in (1, 2):
        deeper = replace(config, num_layers=num_layers, sliding_windows=())
        model = CausalLM(deeper, group, dtype=dtype)
        initialise_parameters(model, seed=0)
        model.model.choose_layout = layout
        step = Step(torch.zeros(num_tokens, dtype=torch.long, device=group.device), (SequenceSlice(num_tokens),))
        totals.append(saved_bytes(model, step))
    return totals[1] - totals[0]


def rows(group: TensorParallelGroup, num_tokens: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    found = []
    for layout in (Replicate, ShardTokens):
        derived = layer_activations(
            CONFIG, num_tokens, dtype.itemsize, group.size, group.rank, sharded=layout is ShardTokens
        )
        measured = measured_layer_bytes(CONFIG, group, layout, num_tokens, dtype)
        found.append(
            {
                "tp_size": group.size,
                "rank": group.rank,
                "layout": layout.__name__,
                "tokens": num_tokens,
                "dtype": str(dtype),
                "derived_bytes": derived.total,
                "derived_stream_bytes": derived.stream,
                "measured_bytes": measured,
                "ratio": measured / derived.total,
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--json", type=output_file, help="append the rows of all ranks to this file, one a line")
    arguments = parser.parse_args()
    group = TensorParallelGroup.from_environment()
    for dtype in (torch.float32, torch.bfloat16):
        of_ranks = group.communicator.all_gather_object(rows(group, arguments.tokens, dtype))
        if group.rank == 0:
            for row in (row for of_rank in of_ranks for row in of_rank):
                print(
                    f"t={row['tp_size']} rank {row['rank']} {row['layout']:<11} {row['dtype']:<14} "
                    f"measured {row['measured_bytes']:>11,} B  derived {row['derived_bytes']:>11,} B  "
                    f"ratio {row['ratio']:.4f}"
                )
                if arguments.json:
                    with arguments.json.open("a") as out:
                        out.write(json.dumps(row) + "\n")
    group.close()


if __name__ == "__main__":
    main()
