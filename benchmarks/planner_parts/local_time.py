"""Prefill and decode of real models on this machine, by the profile that `plan --calibrate` made of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.planner_parts.comparison import RESULTS, Comparison
from launch.measurement.command_line import tell
from launch.measurement.decoding import Case
from launch.measurement.decoding import compare as measure_cases
from launch.measurement.lineup import lineup
from launch.measurement.model_facts import model_facts
from launch.measurement.peers.task import Task
from tp.config import ModelConfig
from tp.planning.hardware import Profile
from tp.planning.plan import Workload, decode_time, prefill_time
from tp.planning.precision import Precision

STORED = RESULTS / "planner-time.json"
CASES = (
    Case("prefill", 1, 64, 1),
    Case("prefill", 1, 256, 1),
    Case("prefill", 1, 512, 1),
    Case("prefill", 2, 300, 1),
    Case("decode", 1, 64, 32),
    Case("decode", 3, 64, 16),
    Case("decode", 8, 64, 16),
    Case("decode", 1, 768, 16),
)
"""None of them is timed by the calibration, nor is any of the models."""


def measure(models: Sequence[Path], degrees: Sequence[int], threads: int, rounds: int) -> list[dict[str, Any]]:
    """Medians of every case, degrees in turns."""
    from tp.checkpoint.settings import read_model_config

    rows = []
    for model in models:
        task = Task(str(model), "bfloat16", most_sequences=8, most_tokens=1024)
        contestants = lineup(task, degrees, [], threads)
        facts = model_facts(str(model), "bfloat16")
        measured = measure_cases(contestants, CASES, facts, rounds=rounds, timeout_s=600.0, watch=tell)
        config = read_model_config(str(model)).to_hf()
        rows += [
            {
                "model": model.name,
                "config": config,
                "tp_size": row.processes,
                "phase": row.phase,
                "batch": row.batch,
                "prompt_tokens": row.prompt_tokens,
                "new_tokens": row.new_tokens,
                "ms": row.milliseconds.median,
                "lowest_ms": row.milliseconds.minimum,
                "highest_ms": row.milliseconds.maximum,
            }
            for row in measured.rows
        ]
    return rows


def compare(rows: Sequence[dict[str, Any]], profile: Profile) -> list[Comparison]:
    """Milliseconds to the first token, and of a decode step."""
    compared = []
    for row in rows:
        decodes = row["phase"] == "decode"
        workload = Workload(
            ModelConfig.from_hf(row["config"]),
            Precision.of("bfloat16"),
            profile,
            batch=row["batch"],
            context=row["prompt_tokens"] + (row["new_tokens"] // 2 if decodes else 0),
        )
        predicted = (decode_time if decodes else prefill_time)(workload, row["tp_size"])
        case = f"{row['phase']}, batch {row['batch']}, {row['prompt_tokens']} tokens"
        name = f"{row['model']}, tp {row['tp_size']}, {case}"
        compared.append(Comparison(name, 1e3 * predicted.seconds, row["ms"]))
    return compared
