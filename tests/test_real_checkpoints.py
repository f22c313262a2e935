"""Real checkpoints give the greedy ids of transformers, in float32, at any degree.

A GGUF file is compared with transformers loading the same file, a directory with the directory. SmolLM2 has 9 query
heads, which other engines refuse at t = 2. Qwen2.5-Coder-0.5B's path comes from TP_DECODER_QWEN (a directory that
holds qwen2.5-coder-0.5b.gguf and, beside it, the Hub directory qwen2.5-coder-0.5b).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from real_checkpoints import fetch_smollm2, transformers_from_gguf

import tp
from tp.generation import GenerationOptions

PROMPTS = ["def fibonacci(n):", "Once upon a time, in a village by the sea,"]
NEW_TOKENS = 16


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk, and what transformers makes of it: greedy continuations, and the logits after each prompt."""

    path: Path
    ids: list[tuple[int, ...]]
    logits: list[torch.Tensor]


@pytest.fixture(scope="module")
def smollm2_file(tmp_path_factory):
    from launch.demo_checkpoint import UnavailableError

    try:
        return fetch_smollm2(tmp_path_factory.mktemp("download"))
    except UnavailableError as error:
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")


@pytest.fixture(scope="module")
def smollm2_gguf(smollm2_file):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_file.parent, gguf_file=smollm2_file.name)
    model = transformers_from_gguf(smollm2_file, torch.float32)
    return Checkpoint(smollm2_file, *transformers_ids(model, tokenizer))


@pytest.fixture(scope="module")
def smollm2_directory(smollm2_file, tmp_path_factory):
    """A Hub directory made from the file, which transformers reads too: it is slow at GGUF."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from launch.__main__ import main

    directory = tmp_path_factory.mktemp("hub") / "smollm2"
    assert main(["convert", "--model", str(smollm2_file), "--output", str(directory)]) == 0
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return Checkpoint(directory, *transformers_ids(model, AutoTokenizer.from_pretrained(directory)))


@pytest.fixture(scope="module")
def qwen():
    root = os.environ.get("TP_DECODER_QWEN")
    if not root:
        pytest.skip("TP_DECODER_QWEN does not name a directory with Qwen2.5-Coder-0.5B")
    return Path(root, "qwen2.5-coder-0.5b.gguf"), Path(root, "qwen2.5-coder-0.5b")


def transformers_ids(model, tokenizer):
    """Greedy continuations of each prompt alone, and the logits after each prompt."""
    continuations, logits = [], []
    with torch.no_grad():
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            logits.append(model(ids).logits[0, -1])
            out = model.generate(ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
            continuations.append(tuple(out[0, ids.shape[1] :].tolist()))
    return continuations, logits


def _load_and_generate(group, path):
    model = tp.load(str(path), group, "float32")
    options = GenerationOptions(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    sequences = model.generate(PROMPTS if group.rank == 0 else None, options).sequences
    with torch.no_grad():
        logits = [model(torch.tensor([s.prompt_ids]))[0, -1] for s in sequences]
    return [s.new_ids for s in sequences], logits


def assert_close(logits, expected, tolerance):
    for mine, theirs in zip(logits, expected, strict=True):
        assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("t", [2, 3, *(pytest.param(t, marks=pytest.mark.long) for t in (1, 4))])
def test_smollm2_directory(ranks, smollm2_directory, t):
    assert_parity(ranks(t), smollm2_directory)


@pytest.mark.long
@pytest.mark.parametrize("t", [1, 2, 3, 4])
def test_smollm2_gguf(ranks, smollm2_gguf, t):
    assert_parity(ranks(t), smollm2_gguf)


def assert_parity(pool, checkpoint):
    for ids, logits in pool.run(_load_and_generate, checkpoint.path, timeout_s=240):
        assert ids == checkpoint.ids
        assert_close(logits, checkpoint.logits, 1e-4)


@pytest.mark.long
@pytest.mark.parametrize("t", [1, 2, 3, 4, 5, 7])
def test_qwen_directory(ranks, qwen, t):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(qwen[1], dtype=torch.float32).eval()
    expected_ids, expected_logits = transformers_ids(model, AutoTokenizer.from_pretrained(qwen[1]))
    del model
    for ids, logits in ranks(t).run(_load_and_generate, qwen[1], timeout_s=900):
        assert ids == expected_ids
        assert_close(logits, expected_logits, 1e-4)


@pytest.mark.long
@pytest.mark.parametrize("t", [1, 2, 5])
def test_qwen_gguf(ranks, qwen, t):
    """Logits only: one prompt's margin between the first two tokens is below the tolerance."""
    from transformers import AutoTokenizer

    model = transformers_from_gguf(qwen[0], torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(qwen[0].parent, gguf_file=qwen[0].name)
    _, expected_logits = transformers_ids(model, tokenizer)
    del model
    for _, logits in ranks(t).run(_load_and_generate, qwen[0], timeout_s=900):
        assert_close(logits, expected_logits, 1e-3)
