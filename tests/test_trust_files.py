"""Faults of files and of values on the command line, by name: each is one clear error, at once, before memory is taken.

Others of the kind are where what they damage is tested: headers and slices in test_checkpoint_sources, indexes, links
and places in test_checkpoint_places, missing and misshapen tensors in test_checkpoint_loading, settings of GGUF in
test_checkpoint_gguf, tokenizers and code of checkpoints in test_checkpoint_tokenizer, fields of configurations in
test_config, a full disk in test_checkpoint_writer, lines of training data in test_training_data, interrupted saves in
test_training_run, files of results in test_bench_rows, options in test_launch_arguments. Damage drawn at random is in
test_trust_fuzz.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoint_samples import load, make_config, make_tensors, write_directory, write_gguf
from safetensors.torch import load_file, save_file
from tiny_models import ROPE_PARAMETERS, hub_config

from launch import ranks
from launch.__main__ import main
from tp.checkpoint import open_checkpoint
from tp.checkpoint.directory import generation_eos_token_ids
from tp.checkpoint.gguf_header import GgufHeader
from tp.checkpoint.gguf_source import GgufSource
from tp.checkpoint.safetensors_source import SafetensorsSource
from tp.checkpoint.settings import read_model_config
from tp.config import ModelConfig
from tp.errors import CheckpointError, ConfigError, RequestError
from tp.parallel import TensorParallelGroup

ALONE = TensorParallelGroup.alone()
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 988097824\n"


@pytest.fixture
def at_once() -> Iterator[None]:
    """What takes longer than this, or much memory, was not refused by a limit."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.perf_counter() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


# Safetensors.


def safetensors(path: Path, header: str | bytes, values: bytes = bytes(24)) -> Path:
    header = header.encode() if isinstance(header, str) else header
    path.write_bytes(len(header).to_bytes(8, "little") + header + values)
    return path


def entry(begin: int = 0, end: int = 24, shape: Any = (2, 3), dtype: str = "F32") -> str:
    return json.dumps({"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]})


@pytest.mark.parametrize(
    "header, message",
    [
        (f'{{"a": {entry()}, "b": {entry()}}}', "b shares bytes with the tensor before it"),
        (f'{{"a": {entry(0, 16, [4])}, "b": {entry(12, 24, [3])}}}', "b shares bytes"),
        (f'{{"a": {entry(0, 8, [2])}, "b": {entry(12, 24, [3])}}}', "b leaves a gap before it"),
        (f'{{"a": {entry(0, 20, [5])}}}', "has 4 bytes that belong to no tensor"),
        (f'{{"a": {entry()}, "a": {entry()}}}', "'a' is there twice"),
        (f'{{"a": {entry(shape=[2.0, 3])}}}', "lists of integers"),
        (f'{{"a": {entry(shape=[True, 6])}}}', "lists of integers"),
        ('{"a": {"dtype": "F32", "shape": "23", "data_offsets": [0, 24]}}', "lists of integers"),
        ('{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 24]}}', "lists of integers"),
        ('{"a": {"dtype": "F32", "shape": [6]}}', "lacks 'data_offsets'"),
        (f'{{"a": {entry(shape=[-2, -3])}}}', "is negative"),
        (f'{{"a": {entry(shape=[2**62] * 50_000)}}}', "more than 8 dimensions"),
        (f'{{"a": {entry(dtype="F31")}}}', "no dtype 'F31'"),
        (f'{{"a": {entry(0, 24, [2, 3], "I64")}}}', "does not take the 24 bytes"),
        (f'{{"a": {entry()}}}'.encode("utf-16"), "damaged safetensors header"),
        (f'{{"__metadata__": {{"format": 3}}, "a": {entry()}}}', "__metadata__ is no object of strings"),
        (f'{{"__metadata__": NaN, "a": {entry()}}}', "NaN is no number of JSON"),
        ('{"a": ' + "[" * 50 + "]" * 50 + "}", "more than 32 deep"),
    ],
)
@pytest.mark.usefixtures("at_once")
def test_safetensors_headers(tmp_path: Path, header: str | bytes, message: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        SafetensorsSource([safetensors(tmp_path / "model.safetensors", header)])
    assert message in str(raised.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "model.gguf"])
def test_pointers_of_git_lfs(tmp_path: Path, name: str) -> None:
    config = make_config(num_layers=1)
    path = write_directory(tmp_path / "m", config, make_tensors(config), num_files=2 if "index" in name else 1)
    (path / name).write_bytes(LFS_POINTER)
    with pytest.raises(CheckpointError, match="is not valid JSON|not a safetensors file|is not a GGUF file"):
        open_checkpoint(path / name if name == "model.gguf" else path, ALONE)


# JSON.


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json", "m.gguf"])
@pytest.mark.usefixtures("at_once")
def test_a_pipe_in_a_files_place_is_not_waited_for(tmp_path: Path, name: str) -> None:
    config = make_config(num_layers=1)
    path = write_directory(tmp_path / "m", config, make_tensors(config), num_files=2)
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    with pytest.raises(CheckpointError, match="is not a regular file|has no config.json|no model.safetensors.index"):
        open_checkpoint(path / name if name == "m.gguf" else path, ALONE)
    if name == "config.json":
        with pytest.raises(CheckpointError, match="is not a regular file"):
            read_model_config(str(path / name))


@pytest.mark.parametrize(
    "content, message",
    [
        ("[" * 10**5, "too deep to be read"),
        ('{"model_type": ' + "[" * 40 + "]" * 40 + "}", "more than 32 deep"),
        ('{"hidden_size": 2, "hidden_size": 4}', "'hidden_size' is there twice"),
        ('{"hidden_size": [' + "[]," * 2**21 + "[]]}", "more than 2097152 values"),
        (None, "JSON of more than 100000000 is not read"),
    ],
)
@pytest.mark.usefixtures("at_once")
def test_json_that_is_no_configuration(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content or "")
    if content is None:
        os.truncate(path, 2**40)
    with pytest.raises(CheckpointError, match=message):
        read_model_config(str(tmp_path))


# Configurations.


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_hidden_layers": 2**31 - 1}, "num_layers is 2147483647: it must be a positive integer of at most 4096"),
        ({"num_hidden_layers": 10**30}, "num_layers is 10+: it must be"),
        ({"num_attention_heads": 2**31 - 1, "num_key_value_heads": 2**31 - 1}, "num_attention_heads is 2147483647"),
        ({"head_dim": 2**30}, "head_dim is 1073741824: it must be a positive integer of at most 65536"),
        ({"vocab_size": 2**30, "hidden_size": 9 * 2**26}, "would have more than 2.48 elements"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"attention_bias": "no"}, "attention_bias|qkv_bias"),
        ({"attention_dropout": float("nan")}, "attention_dropout is nan"),
        ({"attention_dropout": 1.5}, "attention_dropout is 1.5"),
        ({"rms_norm_eps": float("inf")}, "norm_eps is inf"),
        ({"initializer_range": -1.0}, "initializer_range"),
        ({"bos_token_id": -7}, "bos_token_id is -7"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ({"eos_token_id": 10**30}, "eos_token_id 0 is 10+"),
        ({"rope_parameters": ROPE_PARAMETERS["yarn"] | {"truncate": "no"}}, "truncate is 'no'"),
        ({"rope_parameters": ROPE_PARAMETERS["yarn"] | {"factor": float("inf")}}, "factor is inf"),
        ({"rope_parameters": ROPE_PARAMETERS["yarn"] | {"beta_fast": -3}}, "beta_fast is -3.0: it must be a positive"),
        (
            {"rope_parameters": ROPE_PARAMETERS["yarn"] | {"beta_fast": 5e-324}},
            "beta_fast is 5e-324: it must be at least",
        ),
        ({"rope_parameters": ROPE_PARAMETERS["llama3"] | {"low_freq_factor": 4.0}}, "not below high_freq_factor"),
        ({"rope_parameters": ROPE_PARAMETERS["linear"] | {"rope_theta": 1e-320}}, "must be at least 1"),
        ({"rope_parameters": ROPE_PARAMETERS["dynamic"], "head_dim": 2}, "divides by head_dim - 2"),
    ],
)
@pytest.mark.usefixtures("at_once")
def test_configurations(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(hub_config("llama", **changes))


@pytest.mark.parametrize("value", ["1", 1.0, True, -1, [[1]], 2**31, 10**30])
def test_ids_that_end_a_sequence(tmp_path: Path, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match="neither a token id nor a list of them"):
        generation_eos_token_ids(tmp_path)


# GGUF.

Settings = Callable[[gguf.GGUFWriter], None]


def gguf_file(path: Path, settings: Settings = lambda writer: None, **extra: np.ndarray) -> Path:
    config = make_config("llama", num_layers=1)
    return write_gguf(path, config, make_tensors(config), settings=settings, extra=extra)


@pytest.mark.parametrize(
    "settings, extra, message",
    [
        (lambda w: w.add_array("llama.what", ["a", "b"]), {}, "setting llama.what .* is not known"),
        (lambda w: w.add_array("llama.what", list(range(20_000))), {}, "setting llama.what .* is not known"),
        (lambda w: w.add_uint32("general.alignment", 48), {}, "alignment is 48, no power of two"),
        (lambda w: w.add_bool("general.alignment", True), {}, "alignment is True, no power of two"),
        (lambda w: w.add_head_count(2**32 - 1), {}, "num_attention_heads is 4294967295"),
        (lambda w: w.add_block_count(2**32 - 1), {}, "num_layers is 4294967295"),
        (lambda w: None, {"rope_freqs.weight": np.ones(2**17, np.float32) * 2}, "vector of at most 65536"),
        (lambda w: None, {"rope_freqs.weight": np.ones(5, np.float32) * 2}, "has 5 values for a head_dim of 32"),
        (lambda w: None, {"model.norm.weight": np.ones(96, np.float32)}, "two of its tensors are model.norm.weight"),
        (lambda w: None, {f"blk.{'9' * 5000}.ffn_up.weight": np.ones((160, 96), np.float32)}, "which no parameter"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("at_once")
def test_gguf_settings_and_tensors(
    tmp_path: Path, settings: Settings, extra: dict[str, np.ndarray], message: str
) -> None:
    def replaced(writer: gguf.GGUFWriter) -> None:
        for key in ("llama.attention.head_count", "llama.block_count"):
            writer.kv_data[0].pop(key) if key in settings_of(settings) else None
        settings(writer)

    with pytest.raises((CheckpointError, ConfigError), match=message):
        load(gguf_file(tmp_path / "m.gguf", replaced, **extra), ALONE)


def settings_of(settings: Settings) -> set[str]:
    """The keys that a change sets."""
    writer = gguf.GGUFWriter("unused", "llama")
    settings(writer)
    return set(writer.kv_data[0])


def test_a_setting_twice_and_tensors_over_each_other(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"llama.block_count", b"llama.block_bount").replace(
        b"llama.context_length", b"general.architecture"))  # fmt: skip
    with pytest.raises(CheckpointError, match="'general.architecture' is set twice"):
        GgufHeader.read(path)
    name = b"blk.0.ffn_up.weight"
    where = content.index(name) + len(name) + 4 + 16 + 4
    path.write_bytes(content[:where] + bytes(8) + content[where + 8 :])
    with pytest.raises(CheckpointError, match="shares bytes with the tensor before it"):
        GgufSource(GgufHeader.read(path), 6, 2)


@pytest.mark.usefixtures("at_once")
def test_a_gguf_header_without_end_is_not_searched_to_its_end(tmp_path: Path) -> None:
    """Zeros are pairs of an empty name; as strings of a vocabulary they are empty: a terabyte of them is at hand."""
    path = tmp_path / "a.gguf"
    key = (1).to_bytes(8, "little") + b"k" + (9).to_bytes(4, "little") + (8).to_bytes(4, "little")
    room = "damaged or truncated GGUF file: an array claims .* strings: there is no room for their lengths"
    for pairs, message in (
        (b"", "damaged or truncated GGUF file: '' is set twice"),
        (key + (2**60).to_bytes(8, "little"), room),
        (key + (2**36).to_bytes(8, "little"), room),  # in the file there is, in a header there is not
    ):
        path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (2**60).to_bytes(8, "little") + pairs)
        os.truncate(path, 2**40)
        with pytest.raises(CheckpointError, match=message):
            GgufHeader.read(path)


@pytest.mark.parametrize("length", [2**64 - 1, 2**40, 100])
def test_a_string_of_an_array_that_is_longer_than_the_file(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a.gguf"
    key = (1).to_bytes(8, "little") + b"k" + (9).to_bytes(4, "little") + (8).to_bytes(4, "little")
    strings = (2).to_bytes(8, "little") + length.to_bytes(8, "little") + bytes(8)
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little") + key + strings)
    with pytest.raises(CheckpointError, match="damaged or truncated GGUF file: "):
        GgufHeader.read(path)


def test_a_vocabulary_is_no_setting_and_takes_no_memory(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf", lambda w: w.add_array("tokenizer.ggml.scores", [0.5] * 20_000))
    metadata = GgufHeader.read(path).metadata
    assert metadata["tokenizer.ggml.scores"] is None and metadata["tokenizer.ggml.tokens"] is None


# Training.


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, Any, torch.optim.AdamW]:
    """A run directory with a checkpoint of step 3, its model and its optimiser."""
    from launch.training_recipe import RECIPE, Recipe
    from tp.models import CausalLM
    from tp.training.optimizer import adamw
    from tp.training.store import CheckpointStore

    model = CausalLM(make_config("qwen2", num_layers=1))
    optimizer = adamw(model, learning_rate=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    run = {RECIPE: Recipe().to_json(), "data": "0", "dtype": "float32"}
    CheckpointStore(tmp_path / "run").save(3, model, optimizer, None, run)
    return tmp_path / "run", model, optimizer


def test_directories_that_are_no_checkpoints_of_a_run(trained: Any) -> None:
    from tp.training.store import CheckpointStore

    directory, model, optimizer = trained
    for name in ("step-²²²²²²²²", "step-4", "step-000000000004", "step-", "step-0000000x", "step-" + "9" * 200):
        (directory / name).mkdir()
    store = CheckpointStore(directory)
    assert store.steps() == [3]
    store.path_of(3).rename(store.path_of(9))
    with pytest.raises(CheckpointError, match="says step 3: the directory's name was changed"):
        store.load(9, model, optimizer)


def test_moments_that_cannot_be_read(trained: Any) -> None:
    from tp.training.store import CheckpointStore

    directory, model, optimizer = trained
    path = directory / "step-00000003" / "training" / "optimizer.safetensors"
    moments = load_file(path)
    name = "exp_avg.model.norm.weight"
    for tensor, message in ((moments[name].to(torch.int32), "is stored as I32"), (moments[name][1:], "is .95.")):
        save_file({**moments, name: tensor.clone()}, path)
        with pytest.raises(CheckpointError, match=message):
            CheckpointStore(directory).load(3, model, optimizer)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"steps": "ten"}, "recipe.steps is 'ten': it must be an integer"),
        ({"batch_size": 2.0}, "recipe.batch_size is 2.0"),
        ({"steps": 0, "warmup_steps": 0}, "--steps 0 is outside"),
        ({"learning_rate": float("nan")}, "NaN is no number of JSON"),
        ({"beta1": 1.5}, "--beta1 1.5 is outside"),
        ({"surprise": 1}, "unknown field 'surprise'"),
        ("deep", "too deep to be read"),
        ("dtype", "has dtype 'float8'"),
    ],
)
def test_a_damaged_run_json(trained: Any, changes: Any, message: str) -> None:
    from launch.training_check import saved_run
    from launch.training_recipe import RECIPE, Recipe
    from launch.training_setup import compute_dtype

    path = trained[0] / "step-00000003" / "training" / "run.json"
    content = json.loads(path.read_text())
    if isinstance(changes, dict):
        content[RECIPE] |= changes
    path.write_text("[" * 10**5 if changes == "deep" else json.dumps(content | {"dtype": "float8"}))
    arguments = argparse.Namespace(**{field.name: None for field in fields(Recipe)}, output=trained[0], resume=True)
    arguments.dtype = None

    def resume() -> None:
        saved = saved_run(arguments)
        assert saved is not None
        Recipe.of(arguments, saved[RECIPE])
        compute_dtype(arguments, saved, torch.device("cpu"))

    with pytest.raises(CheckpointError, match=message):
        resume()


class Marker:
    """An object whose pickle, where it is loaded, writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.usefixtures("at_once")
def test_tokenized_data(tmp_path: Path) -> None:
    from tp.training.data.encoding import EncodedDocument
    from tp.training.data.storage import open_dataset, write_dataset

    data = tmp_path / "data"
    write_dataset(data, [EncodedDocument([1, 2, 3], [True] * 3, 3, n) for n in range(4)], 9)
    dataset = open_dataset(data)
    assert dataset is not None and dataset.read(3)[0].tolist() == [1, 2, 3]
    del dataset
    documents, ids = (data / "documents.npy").read_bytes(), (data / "token_ids.bin").read_bytes()
    marker = tmp_path / "ran"
    pickled = io.BytesIO()
    np.save(pickled, np.array([Marker(marker)], dtype=object), allow_pickle=True)
    huge = documents.replace(b"'shape': (4,), ", b"'shape': (10**12,), ")
    for content in (pickle.dumps(Marker(marker)), pickled.getvalue(), huge, documents[:-8], b"PK\3\4", b""):
        (data / "documents.npy").write_bytes(content)
        assert open_dataset(data) is None
    assert not marker.exists()
    (data / "documents.npy").write_bytes(documents)
    (data / "token_ids.bin").write_bytes(ids[:-2] + b"\xff\xff")
    dataset = open_dataset(data)
    assert dataset is not None
    with pytest.raises(CheckpointError, match="document 3 of the tokenized data holds id 65535"):
        dataset.read(3)


# Profiles and results.


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c.update(ranks_per_node=0), "ranks_per_node is 0"),
        (lambda c: c.update(ranks_per_node=10**9), "ranks_per_node is 1000000000"),
        (lambda c: c.update(memory_bytes=-1), "memory_bytes is -1"),
        (lambda c: c.update(device="tpu"), "no device tpu: there are cuda, cpu"),
        (lambda c: c.update(rates={}), "it has no rates"),
        (lambda c: c.update(rates={"many": c["rates"]["any"]}), "'many'.* must be a whole number"),
        (lambda c: c["rates"]["any"].update(read_bytes_per_s=0), "read_bytes_per_s is 0.0"),
        (lambda c: c["rates"]["any"].update(eager_layer_s=-1.0), "eager_layer_s is -1.0"),
        (lambda c: c["rates"]["any"]["matrix_flops_per_s"].update(float32=[]), "rates of float32 products"),
        (lambda c: c["rates"]["any"]["matrix_flops_per_s"].update(float32=[[8, 1.0], [2, 1.0]]), "rising rows"),
        (lambda c: c["fabric"].update(algorithms=["magic"]), "no algorithm magic"),
        (lambda c: c["fabric"]["nccl"].update(generation="pascal"), "no generation pascal"),
        (lambda c: c["fabric"].update(extra=1), "unknown field 'extra'"),
    ],
)
def test_hardware_profiles(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    from tp.planning.hardware import PROFILES, load_profile

    content = json.loads((PROFILES / "h100.json").read_text())
    path = tmp_path / "own.json"
    path.write_text(json.dumps(content))
    load_profile(str(path))
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(RequestError, match=message):
        load_profile(str(path))


@pytest.mark.parametrize("value", ["DEEP", [3], "3", True, float("nan")])
def test_rows_of_results(tmp_path: Path, value: Any) -> None:
    from fuzz_targets import Results

    from launch.benching.results_file import read_results

    path = Results(tmp_path).file
    lines = path.read_text().splitlines()
    changed = json.dumps(json.loads(lines[1]) | {"batch": value})
    path.write_text("\n".join([lines[0], changed.replace('"DEEP"', "[" * 10**5), *lines[2:], ""]))
    with pytest.raises(RequestError, match="makes no sense: a row.batch is|line 2: it is no JSON object"):
        read_results(path)


# Tokenizers and their templates.


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt"])
@pytest.mark.usefixtures("at_once")
def test_no_file_of_a_tokenizer_is_read_without_end(tmp_path: Path, name: str) -> None:
    from tp.checkpoint.tokenizer import tokenizer_of_directory

    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read: it is not a regular file"):
        tokenizer_of_directory(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, 2**40)
    with pytest.raises(CheckpointError, match=f"{name} has 1099511627776 bytes: of a tokenizer"):
        tokenizer_of_directory(tmp_path)


def test_a_tokenizer_that_fails_is_a_typed_error() -> None:
    """By an exception, or by a panic of the library, as of a regular expression that gives up on many an "a"."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tp.generation import LanguageModel
    from tp.generation.chat import conversation, encode_chat
    from tp.generation.request import encode_prompts
    from tp.training.data.documents import PlainText
    from tp.training.data.encoding import DocumentEncoder

    panics = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    panics.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    knows_one_word = Tokenizer(models.WordLevel(vocab={"a": 0}, unk_token="[UNK]"))
    model = LanguageModel(make_config(num_layers=1), device="meta")
    for backend in (panics, knows_one_word):
        model.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
        with pytest.raises(CheckpointError, match="the model's tokenizer fails on prompt 0: "):
            encode_prompts(model, ["a" * 30 + "b"])
    model.tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(CheckpointError, match="the model's tokenizer fails on this conversation: "):
        encode_chat(model.tokenizer, conversation("b"))
    with pytest.raises(CheckpointError, match="the model's tokenizer fails on a text from data.txt, line 3 on: "):
        DocumentEncoder(model.tokenizer, [5]).encode(PlainText("b", "data.txt, line 3"))


@pytest.mark.parametrize(
    "template, message",
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes more than 0.5 s"),
        ("{{ ('a ' * 3000000) | wordwrap }}", "takes more than 0.5 s"),  # a constant
        ("{{ (messages[0].content * 3000000) | wordwrap(1) }}", "takes more than 0.5 s"),
        ("{{ 'a' * 10000000000 }}", "refuses these messages: MemoryError"),
        ("{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "MemoryError"),
        ("{{ 9 ** 9 ** 9 }}", "it computes powers"),
        ("{{ dict(a=1, ** {'b': 9} ** 9) }}", "it computes powers"),
        ("{{ 'a' * 100000000 }}", "it makes 100000000 characters"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_chat_template_has_limits(template: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import fuzz_targets  # noqa: F401  so that what is imported there is none of the template's memory
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from tp import chat_template
    from tp.generation.chat import conversation

    monkeypatch.setattr(chat_template, "SECONDS", 0.5 if "0.5 s" in message else 30.0)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[])))
    before = resource.getrlimit(resource.RLIMIT_AS)
    tokenizer.chat_template = "**bold** {{ dict(**dict(a=1, **messages[0])).content }}"
    assert chat_template.render(tokenizer, conversation("a")) == "**bold** a"
    tokenizer.chat_template = template
    with pytest.raises(RequestError, match=message):
        chat_template.render(tokenizer, conversation("a"))
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_a_single_long_step_of_a_template_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from tp import chat_template
    from tp.generation.chat import conversation

    monkeypatch.setattr(chat_template, "SECONDS", 0.3)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[])))
    tokenizer.chat_template = "{% set x = (messages[0].content * 4000000) | int(base=16) %}{{ x * x > 0 }}"
    handler, began = signal.getsignal(signal.SIGALRM), time.perf_counter()
    with pytest.raises(RequestError, match="takes more than 0.3 s"):
        chat_template.render(tokenizer, conversation("f"))
    assert time.perf_counter() - began < 3
    assert signal.getsignal(signal.SIGALRM) is handler and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


class SlowTemplate:
    """Stands for a tokenizer."""

    def get_chat_template(self) -> str:
        return ""

    def apply_chat_template(self, *given: Any, **options: Any) -> str:
        time.sleep(0.3)
        return ""


def test_limits_of_several_threads_are_put_back() -> None:
    from tp.chat_template import render

    before = resource.getrlimit(resource.RLIMIT_AS)
    threads = [threading.Thread(target=render, args=(SlowTemplate(), [])) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    left = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, before)
    assert left == before


# The command line.


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **options: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(ranks, "start", refuse)


@pytest.mark.usefixtures("no_ranks", "at_once")
@pytest.mark.parametrize(
    "argv, status, message",
    [
        (["generate", "--model", "{gguf}", "--prompt", "a", "--tp", "7"], 3, "degree 7 is outside 1..6"),
        (["generate", "--model", "{text}", "--prompt", "a", "--tp", "2"], 4, "is not a GGUF file"),
        (["train", "--config", "c", "--data", "{text}", "--eval-data", "{here}/./data.txt", "--output", "{here}/o",
          "--tokenizer", "{here}", "--tp", "1"], 4, "c cannot be read"),
        (["train", "--model", "{model}", "--data", "{text}", "--eval-data", "{here}/./data.txt", "--output", "{here}/o",
          "--tp", "1"], 2, "is in --data and in --eval-data"),
        (["train", "--model", "{model}", "--data", "x" * 5000, "--output", "{here}/o"], 2, "is no path"),
        (["convert", "--model", "{model}", "--output", "x" * 300], 2, "is no path: File name too long"),
        (["plan", "--model", "{model}", "--hardware", "h100", "--tp", "1-999999999999"], 2, "is not a range"),
        (["plan", "--model", "{model}", "--hardware", "h100", "--nodes", "999999999999"], 2, "--nodes 999999999999 is"),
        (["plan", "--model", "{model}", "--hardware", "h100", "--batch", "999999999"], 2, "--batch 999999999 is more"),
        (["plan", "--model", "{model}", "--hardware", "~nobody-here/x"], 2, "no hardware profile or file"),
        (["plan", "--model", "~nobody-here/x", "--hardware", "h100"], 4, "neither a file or directory nor a Hub id"),
        (["generate", "--model", "\x1b[31m\x07", "--prompt", "a"], 4, r"\x1b[31m\x07"),
    ],
)  # fmt: skip
def test_values_on_the_command_line(
    argv: list[str], status: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(hub_config("qwen2")))
    (tmp_path / "data.txt").write_text("a text\n")
    places = {"gguf": "m.gguf", "text": "data.txt", "model": "model", "here": ""}
    if "{gguf}" in argv:
        gguf_file(tmp_path / "m.gguf")
    told = [text.format(**{name: tmp_path / place for name, place in places.items()}) for text in argv]
    assert main(told) == status
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("\n") == 1


def test_a_message_is_short_and_shows_no_control_characters() -> None:
    message = str(CheckpointError("name \x1b[31m\x00 " + "x" * 10**6 + " the end"))
    assert message.startswith(r"name \x1b[31m\x00 xxx") and message.endswith("x the end") and len(message) < 1300


def test_debug_shows_where_a_typed_error_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["generate", "--prompt", "a"], ["convert", "--output", "o"], ["train", "--tp", "many"]):
        assert main([*command, "--model", "/nowhere", "--debug"]) in (2, 4)
        said = capsys.readouterr().err
        assert said.startswith("Traceback (most recent call last)") and "\nerror: " in said


def test_counts_of_a_model_are_integers() -> None:
    from tp.generation import LanguageModel

    for options in ({"max_batch_size": 1.5}, {"max_batch_size": True}, {"max_context": 1.5}, {"max_context": "9"}):
        with pytest.raises(RequestError, match=f"{next(iter(options))} is "):
            LanguageModel(make_config(num_layers=1), device="meta", **options)  # type: ignore[arg-type]


def test_a_document_is_trained_on_or_held_out() -> None:
    from launch.training_setup import _check_held_out
    from tp.training.data import EncodedDocument, TokenizedDataset

    def dataset(*fingerprints: int) -> TokenizedDataset:
        return TokenizedDataset.of_documents(EncodedDocument([1], [True], 1, number) for number in fingerprints)

    _check_held_out(dataset(1, 2, 3), dataset(4, 5))
    with pytest.raises(RequestError, match="2 of the 3 documents of --eval-data are in --data too, document 2 first"):
        _check_held_out(dataset(1, 2, 3), dataset(4, 3, 1))
