"""`load`: from a checkpoint on disk to sequences, with what a checkpoint says about their ends and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pool import RankPool
from tiny_models import hub_config, transformers_model, write_checkpoint

from tp.config import ModelConfig
from tp.errors import CapacityError, CheckpointError, ConfigError, RequestError
from tp.generation import GenerationOptions
from tp.generation.loading import as_dtype, load
from tp.generation.text_model import context_limit
from tp.parallel import TensorParallelGroup
from tp.rope_config import RopeConfig

PROMPTS = [[3, 1, 4], [15, 9, 2, 6, 5]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings; a config with one end id, a generation_config with two and with sampling settings."""
    path = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", eos_token_id=5)
    settings = {"eos_token_id": [5, 3], "temperature": 0.7, "do_sample": True, "repetition_penalty": 3.0}
    (path / "generation_config.json").write_text(json.dumps(settings))
    return path


def _load_and_generate(group: TensorParallelGroup, path: str, seen: list[int] | None = None) -> tuple[Any, ...]:
    progress: list[tuple[int, int]] = []
    model = load(path, group, "float32", progress=lambda done, of: progress.append((done, of)))
    assert not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight
    result = model.generate(PROMPTS, GenerationOptions(8, ignore_eos=True))
    report = model.load_report
    assert report is not None
    return [list(s.new_ids) for s in result.sequences], model.eos_token_ids, progress[-1], report.bytes_read


@pytest.mark.parametrize("t", [1, 3])
def test_a_loaded_model_generates_what_transformers_does(ranks: RankPool, directory: Path, t: int) -> None:
    reference = transformers_model("qwen3")
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        for _ in range(8):
            ids = torch.cat([ids, reference(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=-1)
        expected.append(ids[0, len(prompt) :].tolist())
    for new_ids, eos_token_ids, (done, of), bytes_read in ranks(t).run(_load_and_generate, str(directory)):
        assert new_ids == expected
        assert eos_token_ids == (5, 3)
        assert done == of > 0
        assert bytes_read > 0


def test_a_text_needs_a_tokenizer_and_says_why_there_is_none(directory: Path) -> None:
    model = load(str(directory))
    model.set_tokenizer_loader(mock.Mock(side_effect=CheckpointError("tokenizer.json is damaged")))
    assert model.tokenizer is None
    with pytest.raises(RequestError, match="tokenizer.json is damaged: give token ids instead"):
        model.generate(["Hello"])
    assert model.generate([[1, 2]], GenerationOptions(2)).sequences[0].text == ""


def test_what_cannot_be_loaded(directory: Path) -> None:
    with pytest.raises(CheckpointError):
        load(str(directory / "absent"))
    with pytest.raises(ConfigError, match="dtype 'int8' is not supported"):
        load(str(directory), dtype="int8")
    with pytest.raises(RequestError, match="max_context is 129: this model takes 1 to 128 tokens"):
        load(str(directory), max_context=129)
    assert as_dtype(torch.float16) is as_dtype("float16") is torch.float16


@pytest.mark.parametrize("max_context, message", [(None, "free"), (100, "the longest context that fits is 7 tokens")])
def test_memory_is_checked_before_anything_is_allocated(directory: Path, max_context: int | None, message: str) -> None:
    config = ModelConfig.from_hf(hub_config("qwen3"))
    weights = 4 * sum(parameter.numel() for parameter in transformers_model("qwen3").parameters())
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    free = weights - 1 if max_context is None else weights + 7 * per_token
    with (
        mock.patch("tp.checkpoint.memory.free_memory", return_value=free),
        mock.patch("tp.generation.loading.materialise", side_effect=AssertionError("allocated")),
        pytest.raises(CapacityError, match=message),
    ):
        load(str(directory), max_context=max_context)


@pytest.mark.parametrize(
    "rope, expected",
    [
        (RopeConfig(), 64),
        (RopeConfig("dynamic", factor=3.0), 192),
        (RopeConfig("yarn", factor=4.0, original_max_position_embeddings=16), 64),
        (RopeConfig("yarn", factor=4.0, original_max_position_embeddings=64), 256),
    ],
)
def test_the_context_is_what_the_model_was_made_for(rope: RopeConfig, expected: int) -> None:
    fields = hub_config("qwen2", max_position_embeddings=64) | {"rope_parameters": rope.to_hf()}
    fields.pop("rope_theta")
    config = ModelConfig.from_hf(fields)
    assert context_limit(config) == expected
    assert context_limit(config, 20) == 20
    with pytest.raises(RequestError, match=f"1 to {expected}"):
        context_limit(config, expected + 1)


def test_importing_generation_needs_torch_alone() -> None:
    heavy = ("transformers", "tokenizers", "safetensors", "gguf", "huggingface_hub", "rich", "jinja2.sandbox")
    code = f"import sys, tp.generation; print([name for name in {heavy} if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output.strip() == "[]"
