"""Saving: whole tensors, the same files at every degree, that transformers and this package read; or nothing."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_samples import (
    assert_same_tensors,
    load,
    make_config,
    make_tensors,
    on_ranks,
    whole_tensors,
    write_directory,
)
from pool import RankPool
from safetensors.torch import load_file

from tp.checkpoint import open_checkpoint, safetensors_file, save_checkpoint, tensor_source
from tp.config import ModelConfig
from tp.errors import CheckpointError
from tp.layers.parameter import named_parts
from tp.models import CausalLM, initialise_parameters
from tp.parallel import TensorParallelGroup

ALONE = TensorParallelGroup.alone()


def reload_and_save(source: Path, target: Path, tp_size: int, **options: Any) -> None:
    on_ranks(tp_size, lambda group: save_checkpoint(load(source, group)[0], target, **options))


def test_degrees_come_and_go_and_no_bit_changes(tmp_path: Path) -> None:
    """Saved at 4, loaded at 2, saved, loaded at 1, saved, and back at 4: what is fused stays apart in the file."""
    config = make_config(tie_word_embeddings=True)
    tensors = make_tensors(config)
    path = write_directory(tmp_path / "original", config, tensors)
    for number, tp_size in enumerate((4, 2, 1, 4)):
        reload_and_save(path, tmp_path / str(number), tp_size)
        path = tmp_path / str(number)
        assert_same_tensors(load_file(path / "model.safetensors"), tensors)
        assert open_checkpoint(path, ALONE).config == ModelConfig(**(vars(config) | {"dtype": "float32"}))
    files = [(tmp_path / str(number) / "model.safetensors").read_bytes() for number in range(4)]
    assert all(content == files[0] for content in files)


@pytest.mark.parametrize("tp_size", [3, 5])
@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_small_pieces_and_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, tp_size: int
) -> None:
    """Heads wider than hidden/heads, 97 rows, 2 KV heads on 5 ranks; head_dim is in the file again."""
    monkeypatch.setattr(tensor_source, "STAGING_BYTES", 5000)
    config = make_config(model_type)
    tensors = {name: tensor.bfloat16() for name, tensor in make_tensors(config).items()}
    source = write_directory(tmp_path / "original", config, tensors)
    target = tmp_path / "saved"
    limit = 50_000
    on_ranks(tp_size, lambda group: save_checkpoint(load(source, group, None)[0], target, max_shard_bytes=limit))
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 3 and {path.name for path in files} == set(index["weight_map"].values())
    assert all(path.stat().st_size < limit + 4096 for path in files)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    saved: dict[str, torch.Tensor] = {}
    for path in files:
        saved |= load_file(path)
    assert_same_tensors(saved, tensors)
    assert json.loads((target / "config.json").read_text())["head_dim"] == 32
    models = [model for model, _ in on_ranks(2, lambda group: load(target, group, None))]
    assert_same_tensors(whole_tensors(models), tensors)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama", "mistral"])
def test_transformers_opens_what_is_saved(tmp_path: Path, model_type: str) -> None:
    from transformers import AutoModelForCausalLM

    config = make_config(model_type)
    source = write_directory(tmp_path / "original", config, make_tensors(config))
    reload_and_save(source, tmp_path / "saved", 3)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert theirs.dtype == torch.float32
    ours = load(tmp_path / "saved", ALONE)[0]
    ids = torch.tensor([[3, 96, 0, 41, 17]])
    with torch.no_grad():
        expected = theirs(ids).logits
        torch.testing.assert_close(ours(ids), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_ends_of_sequence_and_tokenizer_are_saved(tmp_path: Path) -> None:
    class Tokenizer:
        def save_pretrained(self, directory: str) -> None:
            (Path(directory) / "tokenizer.json").write_text("{}")

    config = make_config()
    source = write_directory(tmp_path / "original", config, make_tensors(config))
    reload_and_save(source, tmp_path / "saved", 2, tokenizer=Tokenizer(), eos_token_ids=[5, 3])
    assert (tmp_path / "saved" / "tokenizer.json").exists()
    assert open_checkpoint(tmp_path / "saved", ALONE).generation_eos_token_ids == (5, 3)
    assert open_checkpoint(tmp_path / "saved", ALONE).config.eos_token_ids == (5,)
    reload_and_save(source, tmp_path / "plain", 1)
    assert open_checkpoint(tmp_path / "plain", ALONE).generation_eos_token_ids == (5,)


def test_a_tokenizer_that_cannot_be_saved_is_a_typed_error(tmp_path: Path) -> None:
    class Tokenizer:
        def save_pretrained(self, directory: str) -> None:
            raise TypeError("write() argument must be str, not int")  # of a chat template that is no text

    config = make_config()
    source = write_directory(tmp_path / "original", config, make_tensors(config))
    with pytest.raises(CheckpointError, match="cannot be written: the tokenizer: write.. argument must be str"):
        reload_and_save(source, tmp_path / "saved", 2, tokenizer=Tokenizer())
    assert list(tmp_path.iterdir()) == [source]


def initialise_and_save(group: TensorParallelGroup, config: ModelConfig, target: Path) -> tuple[int, int]:
    """Bytes that this rank holds of Hub tensors, and that went through collectives."""
    model = CausalLM(config, group, dtype=torch.bfloat16)
    initialise_parameters(model, seed=3)
    group.communicator.statistics.reset()
    save_checkpoint(model, target)
    held = sum(p.slice_of(part).nbytes for p in named_parts(model) for part in p.parts)
    return held, group.communicator.statistics.bytes


def test_over_real_processes(ranks: RankPool, tmp_path: Path) -> None:
    """Only what rank 0 lacks is sent, once, by the lowest rank that has it."""
    config = make_config(num_attention_heads=6, num_kv_heads=3)  # at 4 ranks, each KV head is on two of them
    for tp_size in (1, 4):
        result = ranks(tp_size).run(initialise_and_save, config, tmp_path / str(tp_size))
        whole = sum(tensor.nbytes for tensor in load_file(tmp_path / str(tp_size) / "model.safetensors").values())
        assert [sent for _, sent in result] == [whole - result[0][0]] * tp_size
    one, four = (load_file(tmp_path / str(tp_size) / "model.safetensors") for tp_size in (1, 4))
    assert_same_tensors(four, one)


# What must not happen.


def test_a_directory_in_use_is_left_alone(tmp_path: Path) -> None:
    config = make_config()
    source = write_directory(tmp_path / "original", config, make_tensors(config))
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="original exists and is not an empty directory"):
        reload_and_save(source, source, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    (tmp_path / "empty").mkdir()
    reload_and_save(source, tmp_path / "empty", 1)
    assert (tmp_path / "empty" / "config.json").exists()


def test_a_full_disk_is_everyones_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    source = write_directory(tmp_path / "original", config, make_tensors(config))
    written = 0

    def failing_pwrite(descriptor: int, content: memoryview, offset: int) -> int:
        nonlocal written
        written += len(content)
        if written > 100_000:
            raise OSError(28, "No space left on device")
        return len(content)

    monkeypatch.setattr(safetensors_file.os, "pwrite", failing_pwrite)
    messages: list[str] = []
    lock = threading.Lock()

    def save(group: TensorParallelGroup) -> None:
        model = load(source, group)[0]
        try:
            save_checkpoint(model, tmp_path / "saved")
        except CheckpointError as error:
            with lock:
                messages.append(str(error))

    on_ranks(3, save)
    assert len(messages) == 3 and all("No space left on device" in message for message in messages)
    assert [path.name for path in tmp_path.iterdir()] == ["original"]


def test_too_little_room_is_known_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    config = make_config()
    source = write_directory(tmp_path / "original", config, make_tensors(config))
    with pytest.raises(CheckpointError, match=r"saved needs \d+ bytes, 1000 are free"):
        reload_and_save(source, tmp_path / "saved", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["original"]


def test_weights_that_are_not_floats_are_refused_by_name(tmp_path: Path) -> None:
    model = CausalLM(make_config())
    model.model.norm.weight = torch.nn.Parameter(torch.ones(96, dtype=torch.int8), requires_grad=False)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is torch\.int8"):
        save_checkpoint(model, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []
