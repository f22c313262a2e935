"""Draws planning.png: what the planner predicts for three models on one to eight nodes of H100, beside the ideal.

    python docs/images/draw_planning.py [--table]

The shapes are those of Llama-2-7B, Qwen2.5-72B and Llama-3.1-405B.
"""

from __future__ import annotations

import sys
from pathlib import Path

from launch.planning.degrees import usual_degrees
from launch.planning.plot import Curve, draw
from tp.config import ModelConfig
from tp.planning.hardware import load_profile
from tp.planning.plan import ServingPlan, Workload, plan_serving, speed_up
from tp.planning.precision import Precision
from tp.planning.step_time import StepTime

NODES, CONTEXT = 8, 2048
SHAPES = {
    "7B": ("llama", 4096, 32, 32, 32, 11008, 32000),
    "72B": ("qwen2", 8192, 80, 64, 8, 29568, 152064),
    "405B": ("llama", 16384, 126, 128, 8, 53248, 128256),
}
"""Family, hidden size, layers, query heads, KV heads, intermediate size, vocabulary."""


def workload(name: str, hardware: str = "H100") -> Workload:
    """One sequence of `CONTEXT` tokens in bfloat16."""
    family, hidden, layers, heads, kv_heads, intermediate, vocabulary = SHAPES[name]
    config = ModelConfig.from_hf(
        {
            "model_type": family,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": intermediate,
            "vocab_size": vocabulary,
            "max_position_embeddings": 4096,
        }
    )
    return Workload(config, Precision.of("bfloat16"), load_profile(hardware), nodes=NODES, context=CONTEXT)


def plans(name: str) -> list[ServingPlan]:
    """At powers of two, to all ranks of all nodes."""
    asked = workload(name)
    return [plan_serving(asked, degree) for degree in usual_degrees(asked)]


def curve(name: str) -> Curve:
    """Tokens a second of one sequence."""
    found = plans(name)
    return Curve(
        name,
        [plan.tp_size for plan in found],
        [1 / plan.decode.seconds for plan in found],
        [plan.placement.fits for plan in found],
        [bounds(plan.decode, plan.placement.nodes) for plan in found],
    )


def bounds(time: StepTime, nodes: int) -> tuple[float, float]:
    """Tokens a second where every unmeasured constant is at its worse end, and at its better.

    Reading of weights and cache by 7 % either way; a layer's cost from half to one and a quarter of the A100's;
    collectives from three quarters to one and a third of the prediction, between nodes from three quarters to twice.
    """
    collectives = time.latency_s + time.bandwidth_s
    read = time.products_s + time.attention_s + time.stream_s
    slow = 1.07 * read + 1.25 * time.layers_s + (2 if nodes > 1 else 4 / 3) * collectives + time.step_s
    fast = 0.93 * read + 0.5 * time.layers_s + 0.75 * collectives + time.step_s
    return 1 / slow, 1 / fast


def table() -> list[str]:
    """The rows of the table in docs/planning.md."""
    rows = []
    for name in SHAPES:
        asked = workload(name)
        for plan in plans(name):
            time, short = plan.decode, plan.placement.short
            collectives = 1e3 * (time.latency_s + time.bandwidth_s)
            low, high = bounds(time, plan.placement.nodes)
            fits = "yes" if plan.placement.fits else f"{short / 1e9:,.0f} GB too little"
            cells = (
                name,
                f"{plan.tp_size} on {plan.placement.nodes}",
                fits,
                f"{1e3 * time.seconds:.1f}",
                f"{1e3 * time.products_s:.1f}",
                f"{1e3 * time.layers_s:.1f}",
                f"{collectives:.1f}",
                f"{1 / time.seconds:.0f} ({low:.0f} to {high:.0f})",
                f"{speed_up(asked, plan) / plan.tp_size:.0%}",
                f"{plan.throughput / plan.tp_size:,.0f}" if plan.throughput else "-",
                f"{1e3 * plan.prefill.seconds:,.0f}",
            )
            rows.append("| " + " | ".join(cells) + " |")
    return rows


def main() -> None:
    if "--table" in sys.argv:
        print("\n".join(table()))
    title = f"predicted decode, one sequence of {CONTEXT:,} tokens, H100, eight a node"
    Path(__file__).with_name("planning.png").write_bytes(draw([curve(name) for name in SHAPES], title))


if __name__ == "__main__":
    main()
