"""Loading: every element of every tensor, once, at its place, at any degree; no byte more than needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_samples import (
    assert_same_tensors,
    load,
    make_config,
    make_tensors,
    materialise,
    on_ranks,
    whole_tensors,
    write_directory,
)
from pool import RankPool
from torch import nn

from tp.checkpoint import Checkpoint, directory, file_reader, open_checkpoint
from tp.checkpoint.coverage import check_filled, check_over_group
from tp.config import ModelConfig
from tp.errors import CheckpointError, ConfigError
from tp.layers.parameter import NamedParameter, named_parts
from tp.models import CausalLM
from tp.parallel import Part, TensorParallelGroup

ALONE = TensorParallelGroup.alone()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2, 3, 4, 5, 6])
def test_every_element_is_loaded_at_every_degree(tmp_path: Path, tp_size: int, tied: bool) -> None:
    """97 vocabulary rows, 6 query and 2 KV heads, 160 features: little of it divides."""
    config = make_config(tie_word_embeddings=tied)
    tensors = make_tensors(config)
    path = write_directory(tmp_path / "model", config, tensors)
    models = [model for model, _ in on_ranks(tp_size, lambda group: load(path, group))]
    assert_same_tensors(whole_tensors(models), tensors)
    rows = -(-97 // tp_size)
    embeddings = torch.cat([model.model.embed_tokens.weight for model in models])
    assert embeddings.shape == (rows * tp_size, 96)
    assert torch.equal(embeddings[:97], tensors["model.embed_tokens.weight"])
    assert (embeddings[97:] == 0).all(), "padding rows are zero"
    assert not any(parameter.isnan().any() for model in models for parameter in model.parameters())


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "mistral"])
def test_other_families(tmp_path: Path, model_type: str) -> None:
    biases = {"qkv_bias": True, "attention_output_bias": True, "mlp_bias": True} if model_type == "llama" else {}
    config = make_config(model_type, **biases)
    tensors = make_tensors(config)
    path = write_directory(tmp_path / "model", config, tensors, num_files=3)
    for tp_size in (1, 4):
        models = [model for model, _ in on_ranks(tp_size, lambda group: load(path, group))]
        assert_same_tensors(whole_tensors(models), tensors)


def test_shared_kv_heads_keep_their_shape_in_the_file(tmp_path: Path) -> None:
    """2 KV heads on 4 ranks: one a rank, two in the file."""
    config = make_config(num_attention_heads=4, num_kv_heads=2, head_dim=8)
    path = write_directory(tmp_path / "model", config, make_tensors(config))
    models = [model for model, _ in on_ranks(4, lambda group: load(path, group))]
    key = "model.layers.1.self_attn.k_proj.weight"
    assert whole_tensors(models)[key].shape == (2 * 8, 96)
    held = [[p for n in named_parts(model) for p in n.parts if p.name == key] for model in models]
    assert [(part.global_start, part.length) for (part,) in held] == [(0, 8), (0, 8), (8, 8), (8, 8)]


@pytest.mark.parametrize("stored", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [None, torch.float32, torch.bfloat16])
def test_the_dtype_is_the_files_unless_told_otherwise(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype | None
) -> None:
    config = make_config()
    tensors = {name: tensor.to(stored) for name, tensor in make_tensors(config).items()}
    path = write_directory(tmp_path / "model", config, tensors)
    models = [model for model, _ in on_ranks(2, lambda group: load(path, group, wanted))]
    assert_same_tensors(whole_tensors(models), {name: tensor.to(wanted or stored) for name, tensor in tensors.items()})


def test_a_dtype_that_the_configuration_names_comes_first(tmp_path: Path) -> None:
    config = make_config(dtype="float16")
    path = write_directory(tmp_path / "model", config, make_tensors(config))
    assert open_checkpoint(path, ALONE).default_dtype == torch.float16
    path = write_directory(tmp_path / "odd", make_config(dtype="float8_e4m3fn"), make_tensors(config))
    with pytest.raises(CheckpointError, match="float8_e4m3fn"):
        open_checkpoint(path, ALONE)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig]:
    """A float32 file of 64 MB whose sizes divide by 4."""
    config = make_config(
        "llama",
        hidden_size=512,
        num_attention_heads=8,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=2048,
        vocab_size=16000,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("large") / "model"
    return write_directory(path, config, make_tensors(config)), config


def test_a_rank_reads_its_share_of_bytes(large: tuple[Path, ModelConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    path, config = large
    sizes = {part.name: p.tensor.nbytes for p in named_parts(CausalLM(config, device="meta")) for part in p.parts}
    total = (path / "model.safetensors").stat().st_size
    assert 60e6 < total < 70e6
    replicated = sum(64 * 32 for name in sizes if "norm" in name)
    counted = 0
    lock = threading.Lock()

    def counting_preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal counted
        count = os.preadv(descriptor, buffers, offset)
        with lock:
            counted += count
        return count

    class CountingOs:
        preadv = staticmethod(counting_preadv)

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

    monkeypatch.setattr(file_reader, "os", CountingOs())
    reports = [report for _, report in on_ranks(4, lambda group: load(path, group, torch.bfloat16))]
    for report in reports:
        assert report.bytes_read <= 0.25 * (total - replicated) + replicated + 0.01 * total
    header = 8 + int.from_bytes((path / "model.safetensors").read_bytes()[:8], "little")
    assert counted == sum(report.bytes_read for report in reports) + 4 * header


ALLOCATOR_NOISE = 4 * 2**20
"""Bytes by which a process's memory differs from run to run; a whole tensor of the large file has 32 MB."""


def peak_and_shard(
    group: TensorParallelGroup, tiny: tuple[Path, ModelConfig], large: tuple[Path, ModelConfig], dtype: torch.dtype
) -> tuple[int, int]:
    """Peak of this process's memory while it makes and loads a shard, less what it had, and the shard's bytes."""
    make_and_load(group, *tiny, dtype)  # what this imports is the interpreter's own
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins again
    before = memory_of_this_process("VmRSS")
    model = make_and_load(group, *large, dtype)
    shard = sum(parameter.nbytes for parameter in model.parameters())
    return memory_of_this_process("VmHWM") - before, shard


def make_and_load(group: TensorParallelGroup, path: Path, config: ModelConfig, dtype: torch.dtype) -> CausalLM:
    model = materialise(CausalLM(config, group, dtype=dtype, device="meta"))
    Checkpoint(config, dtype, (), directory.open_weights(path), path, group).load_into(model)
    return model


def memory_of_this_process(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_takes_little_more_memory_than_its_shard(
    large: tuple[Path, ModelConfig], tmp_path: Path, dtype: torch.dtype
) -> None:
    config = make_config()
    tiny = write_directory(tmp_path / "tiny", config, make_tensors(config)), config
    with closing(RankPool()) as fresh:  # what earlier calls freed would be taken again, unseen
        measured = fresh(4).run(peak_and_shard, tiny, large, dtype)
    for peak, shard in measured:
        assert 0.9 * shard < peak < 1.2 * shard + ALLOCATOR_NOISE


def test_progress_counts_up_to_this_ranks_bytes(tmp_path: Path) -> None:
    config = make_config()
    path = write_directory(tmp_path / "model", config, make_tensors(config))
    checkpoint = open_checkpoint(path, ALONE)
    model = materialise(CausalLM(checkpoint.config, ALONE, device="meta"))
    seen: list[tuple[int, int]] = []
    checkpoint.load_into(model, lambda done, total: seen.append((done, total)))
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (total, total)
    assert {of for _, of in seen} == {total}


# What must be refused.


def fails_to_load(path: Path, tp_size: int, message: str) -> None:
    """The same error on every rank, from a model on the meta device: before anything is allocated."""
    messages = []

    def verify(group: TensorParallelGroup) -> None:
        try:
            checkpoint = open_checkpoint(path, group)
            checkpoint.verify(CausalLM(checkpoint.config, group, device="meta"))
        except CheckpointError as error:
            messages.append(str(error))

    on_ranks(tp_size, verify)
    assert len(messages) == tp_size and len(set(messages)) == 1, messages
    assert message in messages[0]


@pytest.mark.parametrize("tp_size", [1, 3])
def test_a_tensor_that_is_missing_unused_or_misshapen_is_named(tmp_path: Path, tp_size: int) -> None:
    config = make_config()
    tensors = make_tensors(config)
    lost = "model.layers.1.self_attn.v_proj.bias"
    fewer = {name: tensor for name, tensor in tensors.items() if name != lost}
    fails_to_load(write_directory(tmp_path / "missing", config, fewer), tp_size, f"lacks {lost}")
    more = tensors | {"model.layers.2.mlp.up_proj.weight": torch.zeros(3, 3)}
    message = "holds model.layers.2.mlp.up_proj.weight, which no parameter"
    fails_to_load(write_directory(tmp_path / "unused", config, more), tp_size, message)
    half = tensors | {"model.embed_tokens.weight": torch.zeros(48, 96)}
    message = "model.embed_tokens.weight is [48, 96] in the checkpoint, its configuration says [97, 96]"
    fails_to_load(write_directory(tmp_path / "half", config, half), tp_size, message)
    turned = tensors | {"model.norm.weight": torch.zeros(96, 1)}
    fails_to_load(write_directory(tmp_path / "turned", config, turned), tp_size, "model.norm.weight is [96, 1]")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_weights_that_are_not_plain_floats_are_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    config = make_config()
    tensors = make_tensors(config)
    tensors["model.layers.0.mlp.down_proj.weight"] = tensors["model.layers.0.mlp.down_proj.weight"].to(dtype)
    path = write_directory(tmp_path / "model", config, tensors)
    fails_to_load(path, 2, "model.layers.0.mlp.down_proj.weight is stored as")


def test_buffers_of_old_checkpoints_are_allowed(tmp_path: Path) -> None:
    config = make_config()
    tensors = make_tensors(config)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    path = write_directory(tmp_path / "model", config, tensors | extra)
    assert_same_tensors(whole_tensors([load(path, ALONE)[0]]), tensors)


@pytest.mark.parametrize("tp_size", [1, 4])
def test_a_tied_models_lm_head_must_be_its_embedding(tmp_path: Path, tp_size: int) -> None:
    config = make_config(tie_word_embeddings=True)
    tensors = make_tensors(config)
    head = tensors["model.embed_tokens.weight"].clone()
    path = write_directory(tmp_path / "same", config, tensors | {"lm_head.weight": head})
    models = [model for model, _ in on_ranks(tp_size, lambda group: load(path, group, torch.bfloat16))]
    assert_same_tensors(whole_tensors(models), {name: tensor.bfloat16() for name, tensor in tensors.items()})
    other = head.clone()
    other[96, 3] += 1
    path = write_directory(tmp_path / "other", config, tensors | {"lm_head.weight": other})
    with pytest.raises(CheckpointError, match="lm_head.weight differs from model.embed_tokens.weight"):
        on_ranks(tp_size, lambda group: load(path, group))
    path = write_directory(tmp_path / "shorter", config, tensors | {"lm_head.weight": head[:90].clone()})
    with pytest.raises(CheckpointError, match="lm_head.weight differs"):
        on_ranks(tp_size, lambda group: load(path, group))


def test_an_untied_model_needs_its_lm_head(tmp_path: Path) -> None:
    config = make_config()
    tensors = make_tensors(config)
    del tensors["lm_head.weight"]
    fails_to_load(write_directory(tmp_path / "model", config, tensors), 1, "lacks lm_head.weight")


def test_a_degree_above_the_heads_is_refused_before_weights_are_looked_for(tmp_path: Path) -> None:
    config = make_config()
    path = write_directory(tmp_path / "model", config, {})
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="degree 7 is outside 1..6"):
        on_ranks(7, lambda group: open_checkpoint(path, group))


def test_an_error_while_reading_on_one_rank_is_everyones(tmp_path: Path) -> None:
    config = make_config()
    path = write_directory(tmp_path / "model", config, make_tensors(config))
    messages: list[str] = []

    def load_shrunk(group: TensorParallelGroup) -> None:
        checkpoint = open_checkpoint(path, group)
        model = materialise(CausalLM(checkpoint.config, group, device="meta"))
        if group.rank == 2:
            checkpoint = shrunk(checkpoint)
        try:
            checkpoint.load_into(model)
        except CheckpointError as error:
            messages.append(str(error))

    def shrunk(checkpoint: Checkpoint) -> Checkpoint:
        def fail(*args: Any) -> int:
            raise CheckpointError("rank 2 has a bad disk")

        checkpoint.source.read_into = fail  # type: ignore[method-assign]
        return checkpoint

    on_ranks(3, load_shrunk)
    assert messages == ["rank 2 has a bad disk"] * 3


def parameter_of(size: int, *cuts: tuple[int, int, int], global_length: int = 100) -> NamedParameter:
    """A vector with parts (local_start, global_start, length) of one tensor."""
    parts = tuple(Part("w", 0, start, length, local, global_length, (0,)) for local, start, length in cuts)
    return NamedParameter("m.w", nn.Parameter(torch.zeros(size)), parts)


def test_parts_must_fill_a_parameter() -> None:
    check_filled(parameter_of(10, (0, 20, 10)))
    check_filled(parameter_of(10, (4, 50, 6), (0, 20, 4)))
    check_filled(parameter_of(10, (0, 92, 8)))  # rows 8 and 9 are padding: the tensor ends there
    check_filled(parameter_of(10))  # a rank past the end of the vocabulary
    for wrong in (
        parameter_of(10, (0, 20, 5)),  # half of the rows
        parameter_of(10, (0, 20, 6), (5, 40, 5)),  # an element twice
        parameter_of(10, (0, 20, 4), (5, 40, 5)),  # a gap
        parameter_of(10, (2, 92, 8)),  # padding in front
        parameter_of(10, (0, 20, 11)),  # more than there is
    ):
        with pytest.raises(CheckpointError, match="w"):
            check_filled(wrong)


def test_ranks_together_must_hold_every_element_on_exactly_the_ranks_named() -> None:
    def part(start: int, length: int, *sharers: int) -> Part:
        return Part("w", 0, start, length, 0, 10, sharers)

    check_over_group([[part(0, 5, 0)], [part(5, 5, 1)]], ["w"])
    check_over_group([[part(0, 10, 0, 1)], [part(0, 10, 0, 1)]], ["w"])
    check_over_group([[part(0, 4, 0), part(4, 2, 0, 1)], [part(4, 2, 0, 1), part(6, 4, 1)]], ["w"])
    for wrong in (
        [[part(0, 5, 0)], [part(6, 4, 1)]],  # element 5 nowhere
        [[part(0, 5, 0)], [part(5, 4, 1)]],  # element 9 nowhere
        [[part(1, 9, 0)], []],  # element 0 nowhere
        [[part(0, 6, 0)], [part(5, 5, 1)]],  # element 5 twice, unnamed
        [[part(0, 10, 0, 1)], []],  # a sharer without it
        [[part(0, 10, 0)], [part(0, 10, 0)]],  # a holder that is no sharer
        [[part(0, 5, 0), part(0, 5, 0)], [part(5, 5, 1)]],  # twice on one rank
        [[part(0, 5, 0)], [Part("w", 1, 5, 5, 0, 10, (1,))]],  # cut along different dimensions
    ):
        with pytest.raises(CheckpointError, match="w"):
            check_over_group(wrong, ["w"])
    with pytest.raises(CheckpointError, match="holds v, which no parameter"):
        check_over_group([[part(0, 10, 0)]], ["w", "v"])
