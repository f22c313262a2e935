"""Prefill and decode of real models on this machine, by the profile that `plan --calibrate` made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.planner_parts.comparison import RESULTS, Comparison
from launch.measurement.cases import Case
from launch.measurement.spread import middle_mean
from launch.planning.machine import Measurements, Subject
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


def subjects(models: Sequence[Path]) -> list[Subject]:
    """What is timed of the models, in the rounds of the calibration: all meet the machine as it is by then."""
    from tp.checkpoint.settings import read_model_config

    return [Subject(model.name, str(model), read_model_config(str(model)).vocab_size, CASES) for model in models]


def rows(models: Sequence[Path], measured: Measurements) -> list[dict[str, Any]]:
    """Every case: its time as the calibration takes it, and those of all turns."""
    from tp.checkpoint.settings import read_model_config

    configs = {model.name: read_model_config(str(model)).to_hf() for model in models}
    found = []
    for (name, degree, case), answers in measured.answers.items():
        if name in configs:
            each_ms = [answer.ttft_ms if case.phase == "prefill" else answer.step_ms for answer in answers]
            found.append(
                {
                    "model": name,
                    "config": configs[name],
                    "tp_size": degree,
                    **asdict(case),
                    "ms": middle_mean(each_ms),
                    "each_ms": each_ms,
                }
            )
    return found


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
