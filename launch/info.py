"""`info`: versions, devices, backends and threads of this machine: what a bug report needs."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import tp
from launch.terminal import Terminal
from tp.cores import own_cores

PACKAGES = ("torch", "triton", "transformers", "safetensors", "gguf", "huggingface_hub", "tokenizers", "numpy", "rich")
VARIABLES = ("CUDA_", "GLOO_", "HF_", "MKL_", "NCCL_", "OMP_", "TORCH", "TP_DECODER_", "TRITON_")
CPU_FACTS = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Linux's names of the instructions that multiply bfloat16: x86's, and Arm's."""
DESCRIPTION = "Versions, devices, backends and threads of this machine: what a bug report needs."


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser("info", help="versions, devices, backends, threads", description=DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Prints the facts."""
    facts = gather()
    Terminal.of_process().show((json.dumps(facts) if arguments.json else "\n".join(_lines(facts))) + "\n")
    return 0


def gather() -> dict[str, Any]:
    """The facts, as what --json prints."""
    import torch
    from torch import distributed

    from tp.native.build import library_path

    available = distributed.is_available()
    return {
        "tp-decoder": tp.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": _of_the_cpu("model name") or platform.processor() or platform.machine(),
        "cores": len(own_cores()),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_bfloat16": sorted(BFLOAT16_FLAGS.intersection(_of_the_cpu("flags", "Features").split())),
        "cpp_kernels": str(library_path()) if library_path().exists() else None,
        "cuda": torch.version.cuda,
        "devices": [_device(index) for index in range(torch.cuda.device_count())],
        "backends": {
            "gloo": available and distributed.is_gloo_available(),
            "nccl": available and distributed.is_nccl_available(),
        },
        "environment": {key: value for key, value in sorted(os.environ.items()) if _is_relevant(key)},
    }


def _lines(facts: dict[str, Any]) -> list[str]:
    lines = []
    for name, value in facts.items():
        if isinstance(value, dict):
            lines += [f"{name}:", *(f"  {key}: {inner}" for key, inner in value.items())]
        elif isinstance(value, list):
            lines += [f"{name}:" + ("" if value else " none"), *(f"  {item}" for item in value)]
        else:
            lines.append(f"{name}: {value}")
    return lines


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _device(index: int) -> str:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {properties.major}.{properties.minor}"


def _of_the_cpu(*names: str) -> str:
    """What Linux tells of the first core under one of these names; "" where it does not."""
    try:
        with CPU_FACTS.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() in names:
                    return value.strip()
    except OSError:
        pass
    return ""


def _is_relevant(variable: str) -> bool:
    """Settings of the libraries, but nothing that could be a secret."""
    return variable.startswith(VARIABLES) and not any(word in variable for word in ("TOKEN", "KEY", "SECRET"))
