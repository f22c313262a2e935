"""Bytes of real generations: weights and cache as predicted to the byte, the peak of a rank's process about so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.planner_parts.comparison import RESULTS, Comparison
from tp.config import ModelConfig
from tp.planning.hardware import Profile
from tp.planning.plan import Workload, serving_placement
from tp.planning.precision import Precision

STORED = RESULTS / "planner-memory.json"
PROMPT_TOKENS, NEW_TOKENS = 200, 8


def measure(models: Sequence[Path], degrees: Sequence[int]) -> list[dict[str, Any]]:
    """What each rank says of itself, for each model and degree, with what the prediction needs."""
    return [_measure(model, degree) for model in models for degree in degrees]


def _measure(model: Path, degree: int) -> dict[str, Any]:
    from tp.checkpoint.settings import read_model_config

    config = read_model_config(str(model))
    ids = ",".join(str(5 + position) for position in range(PROMPT_TOKENS))
    command = ["generate", "--model", str(model), "--tp", str(degree), "--prompt-ids", ids, "--device", "cpu"]
    options = ["--max-new-tokens", str(NEW_TOKENS), "--ignore-eos", "--json"]
    ended = subprocess.run([sys.executable, "-m", "launch", *command, *options], capture_output=True, check=True)
    answer = json.loads(ended.stdout)
    fields = ("weight_bytes", "kv_bytes", "peak_rss_bytes")
    return {
        "model": model.name,
        "config": config.to_hf(),
        "tp_size": degree,
        "dtype": answer["dtype"],
        "ranks": [{name: rank[name] for name in fields} for rank in answer["ranks"]],
    }


def compare(runs: Sequence[dict[str, Any]], profile: Profile) -> dict[str, list[Comparison]]:
    """By "weights", "cache" and "peak", a comparison for each rank of each run."""
    compared: dict[str, list[Comparison]] = {"weights": [], "cache": [], "peak": []}
    for run in runs:
        config, degree = ModelConfig.from_hf(run["config"]), run["tp_size"]
        workload = Workload(
            config,
            Precision.of(run["dtype"]),
            replace(profile, ranks_per_node=max(degree, profile.ranks_per_node)),
            context=PROMPT_TOKENS + NEW_TOKENS,
        )
        for rank, (held, memory) in enumerate(
            zip(run["ranks"], serving_placement(workload, degree).memory, strict=True)
        ):
            name = f"{run['model']}, rank {rank} of {degree}"
            compared["weights"].append(Comparison(name, memory.weights, held["weight_bytes"]))
            compared["cache"].append(Comparison(name, memory.cache, held["kv_bytes"]))
            compared["peak"].append(Comparison(name, memory.total, held["peak_rss_bytes"]))
    return compared
