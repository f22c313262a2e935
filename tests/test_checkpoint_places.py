"""Where checkpoints are found: directories, indexes, the Hub's cache; and what each kind of wrong place is told."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import huggingface_hub
import pytest
import torch
import torch.distributed as dist
from checkpoint_samples import (
    assert_same_tensors,
    load,
    make_config,
    make_tensors,
    on_ranks,
    whole_tensors,
    write_directory,
    write_gguf,
)
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from pool import RankPool

from tp.checkpoint import open_checkpoint, same_checkpoint
from tp.checkpoint.hosts import ranks_on_this_host, this_host
from tp.checkpoint.together import work_together
from tp.errors import CheckpointError, ConfigError, RankFailedError
from tp.parallel import TensorParallelGroup
from tp.parallel.timeouts import timeout_of

ALONE = TensorParallelGroup.alone()


def message_on_all_ranks(path: str | Path, tp_size: int = 3) -> str:
    """Opens a bad checkpoint on several ranks; all must say the same."""
    messages: list[str] = []

    def attempt(group: TensorParallelGroup) -> None:
        try:
            open_checkpoint(path, group)
        except CheckpointError as error:
            messages.append(str(error))

    on_ranks(tp_size, attempt)
    assert len(messages) == tp_size and len(set(messages)) == 1, messages
    return messages[0]


def indexed(tmp_path: Path) -> Path:
    return write_directory(tmp_path / "model", make_config(), make_tensors(make_config()), num_files=3)


def edit_index(path: Path, **changes: Any) -> None:
    file = path / "model.safetensors.index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_file_that_the_index_names_but_is_absent(tmp_path: Path) -> None:
    path = indexed(tmp_path)
    (path / "model-00002-of-00003.safetensors").unlink()
    assert "names model-00002-of-00003.safetensors, which is not there" in message_on_all_ranks(path)


def test_an_index_that_names_the_wrong_file_of_a_tensor(tmp_path: Path) -> None:
    path = indexed(tmp_path)
    table = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    edit_index(path, weight_map=table | {"model.norm.weight": "model-00001-of-00003.safetensors"})
    assert "says that model.norm.weight is in model-00001" in message_on_all_ranks(path)
    edit_index(path, weight_map=table | {"model.other": "model-00001-of-00003.safetensors"})
    assert "says that model.other is in model-00001" in message_on_all_ranks(path)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "a/b.safetensors",
        "..",
        "",
        "b.bin",
        "a\\b.safetensors",
        3,
        "x" * 300 + ".safetensors",
        "é" * 200 + ".safetensors",
    ],
)
def test_an_index_that_points_out_of_its_directory(tmp_path: Path, name: object) -> None:
    path = indexed(tmp_path)
    edit_index(path, weight_map={"model.norm.weight": name})
    assert "not a plain safetensors file" in message_on_all_ranks(path)


@pytest.mark.parametrize("table", [None, {}, [], "model.safetensors"])
def test_an_index_without_a_table(tmp_path: Path, table: object) -> None:
    path = indexed(tmp_path)
    edit_index(path, weight_map=table)
    assert "has no weight_map" in message_on_all_ranks(path)


def test_a_link_out_of_the_directory(tmp_path: Path) -> None:
    path = indexed(tmp_path)
    file = path / "model-00003-of-00003.safetensors"
    file.rename(tmp_path / "elsewhere.safetensors")
    file.symlink_to(tmp_path / "elsewhere.safetensors")
    assert "is a link to" in message_on_all_ranks(path)


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, "is not a checkpoint: it has no config.json (only safetensors and GGUF are read)"),
        ({"config.json": "{"}, "config.json is not valid JSON"),
        ({"config.json": "[1]"}, "config.json holds a list, not a JSON object"),
        ({"config.json": "[" * 10**5}, "config.json is not valid JSON"),
        ({"config.json": None}, "has no weights: only safetensors and GGUF are read"),
        (
            {"config.json": None, "pytorch_model.bin": "x"},
            "has no weights: it has PyTorch pickles (pytorch_model.bin), but only safetensors and GGUF are read",
        ),
        ({"config.json": None, "a.gguf": "x"}, "has no weights: name the GGUF file itself (a.gguf)"),
        ({"config.json": None, "a.safetensors": "x", "b.safetensors": "x"}, "has 2 safetensors files and no"),
        ({"config.json": None, "model.safetensors": "x"}, "is not a safetensors file"),
        ({"config.json": None, "generation_config.json": '{"eos_token_id": "</s>"}'}, "eos_token_id is '</s>'"),
        ({"config.json": None, "generation_config.json": '{"eos_token_id": [1, -2]}'}, "eos_token_id is [1, -2]"),
    ],
)
def test_directories_that_are_no_checkpoints(tmp_path: Path, files: dict[str, str | None], message: str) -> None:
    (tmp_path / "model").mkdir()
    for name, content in files.items():
        (tmp_path / "model" / name).write_text(content or json.dumps(make_config().to_hf()))
    assert message in message_on_all_ranks(tmp_path / "model", 2)


def test_a_family_that_is_not_supported_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ConfigError, match="gpt2"):
        open_checkpoint(tmp_path, ALONE)


def test_one_safetensors_file_of_any_name_will_do(tmp_path: Path) -> None:
    config = make_config()
    tensors = make_tensors(config)
    path = write_directory(tmp_path / "model", config, tensors)
    (path / "model.safetensors").rename(path / "weights.safetensors")
    assert_same_tensors(whole_tensors([load(path, ALONE)[0]]), tensors)
    with pytest.raises(CheckpointError, match="give the directory that holds it"):
        open_checkpoint(path / "weights.safetensors", ALONE)


def test_a_gguf_file_may_have_any_name(tmp_path: Path) -> None:
    config = make_config()
    path = write_gguf(tmp_path / "model.bin", config, make_tensors(config))
    assert open_checkpoint(path, ALONE).config.vocab_size == 97
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").touch()
    assert "text is not a GGUF file" in message_on_all_ranks(tmp_path / "text")
    assert "empty is a damaged or truncated GGUF file" in message_on_all_ranks(tmp_path / "empty")


@pytest.mark.parametrize(
    "name", ["no/such/place", "./missing", "~no-such-user/x", "missing.gguf", "a b", "", "/" + "x" * 5000, "\0"]
)
def test_a_name_that_can_be_nothing(name: str) -> None:
    assert "is neither a file or directory nor a Hub id" in message_on_all_ranks(name, 2)


@pytest.mark.parametrize(
    "ids, expected",
    [(3, (3,)), ([5, 3], (5, 3)), (None, (5,)), ("no field", (5,)), ("no file", (5,)), ([], ())],
)
def test_ends_of_sequence_come_from_the_generation_config(
    tmp_path: Path, ids: object, expected: tuple[int, ...]
) -> None:
    """The configuration says 5; one id, several, none, no file at all."""
    path = write_directory(tmp_path / "model", make_config(), make_tensors(make_config()))
    if ids != "no file":
        content = {} if ids == "no field" else {"eos_token_id": ids, "temperature": 0.1}
        (path / "generation_config.json").write_text(json.dumps(content))
    assert open_checkpoint(path, ALONE).generation_eos_token_ids == expected


# The Hub.


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Hub's cache as huggingface_hub lays it out, with the model org/tiny in two files, links into its blobs."""
    repository = tmp_path / "hub" / "models--org--tiny"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    write_directory(snapshot, make_config(), make_tensors(make_config()), num_files=2)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(repository / "blobs" / str(number))
        path.symlink_to(os.path.join("..", "..", "blobs", str(number)))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    yield snapshot
    shutil.rmtree(tmp_path / "hub", ignore_errors=True)


def test_a_model_in_the_hubs_cache_needs_no_network(hub_cache: Path) -> None:
    models = [model for model, _ in on_ranks(2, lambda group: load(Path("org/tiny"), group))]
    assert_same_tensors(whole_tensors(models), make_tensors(make_config()))


def test_a_model_that_is_not_in_the_cache_and_no_network(hub_cache: Path) -> None:
    message = message_on_all_ranks("org/other")
    assert "'org/other' is not a path here, not in the Hub's cache, and the Hub cannot be reached" in message
    assert "\n" not in message


def test_the_lowest_rank_of_a_machine_fetches_before_the_others_look(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, bool, list[str]]] = []
    fetched = threading.Event()
    rank_of_thread: dict[int, int] = {}

    def snapshot_download(name: str, **options: Any) -> str:
        offline = options["local_files_only"]
        assert options["ignore_patterns"] == ["*/*"], "files of subdirectories are other formats of the same weights"
        calls.append((rank_of_thread[threading.get_ident()], offline, options["allow_patterns"]))
        if offline:
            assert fetched.is_set()
        else:
            time.sleep(0.1)
            if "model-00002-of-00002.safetensors" in options["allow_patterns"]:
                fetched.set()
        return str(hub_cache)

    def attempt(group: TensorParallelGroup) -> None:
        rank_of_thread[threading.get_ident()] = group.rank
        open_checkpoint("org/tiny", group)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    on_ranks(3, attempt)
    assert {rank for rank, offline, _ in calls if not offline} == {0}
    assert {rank for rank, offline, _ in calls if offline} == {0, 1, 2}
    asked = {pattern for _, _, patterns in calls for pattern in patterns}
    assert not any(pattern in asked for pattern in ("*", "*.bin", "*.safetensors"))
    assert {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"} < asked


@pytest.mark.parametrize(
    "error, message",
    [
        (LocalEntryNotFoundError("offline"), "the Hub cannot be reached"),
        (OSError("disk\nfull"), "cannot be fetched from the Hub: disk"),
    ],
)
def test_errors_of_the_hub_are_one_line_on_all_ranks(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(name: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert message in message_on_all_ranks("org/tiny")
    assert issubclass(RepositoryNotFoundError, OSError)  # caught before, with a message of its own


def test_a_path_that_only_some_machines_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on different machines see different disks; here: different directories of the same name."""
    from tp.checkpoint import hub

    first = threading.Event()

    def exists(path: Path) -> bool:
        try:
            return not first.is_set()
        finally:
            first.set()

    monkeypatch.setattr(hub, "_exists", exists)
    assert "/data/model exists for rank" in message_on_all_ranks("/data/model")


def test_ranks_of_one_machine_know_each_other() -> None:
    assert on_ranks(3, ranks_on_this_host) == [[0, 1, 2]] * 3
    assert this_host() == this_host() != ""


# Work that takes longer than a collective may.


@contextmanager
def impatient(group: TensorParallelGroup) -> Iterator[TensorParallelGroup]:
    """The same ranks, whose collectives wait no longer than a second."""
    process_group = group.process_group
    assert process_group is not None
    usual = timeout_of(process_group)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), process_group)
    try:
        yield TensorParallelGroup.from_process_group(process_group)
    finally:
        dist.distributed_c10d._set_pg_timeout(usual, process_group)


def work_longer_than_a_timeout(group: TensorParallelGroup) -> str:
    def work() -> str:
        time.sleep(2 if group.rank == 1 else 0)
        return f"rank {group.rank}"

    with impatient(group) as short:
        return work_together(short, work)


def samples_of_a_slow_disk(group: TensorParallelGroup) -> int:
    def read(source: Any, name: str) -> tuple[str, int]:
        time.sleep(2 if group.rank == 1 else 0)
        return "digest", 7

    source: Any = SimpleNamespace(tensors=("only",))
    with mock.patch.object(same_checkpoint, "_sample", read), impatient(group) as short:
        return same_checkpoint.check_same_values(source, short)


def test_ranks_wait_for_the_slowest_beyond_the_timeout_of_collectives(ranks: RankPool) -> None:
    assert ranks(2).run(work_longer_than_a_timeout) == ["rank 0", "rank 1"]
    assert ranks(2).run(samples_of_a_slow_disk) == [7, 7]


def test_an_error_that_is_none_of_ours_ends_the_waiting() -> None:
    seen: list[str] = []

    def attempt(group: TensorParallelGroup) -> None:
        def work() -> None:
            if group.rank == 1:
                raise KeyError("a bug")

        try:
            work_together(group, work)
        except (KeyError, RankFailedError) as error:
            seen.append(f"{type(error).__name__} {error}")

    on_ranks(3, attempt)
    assert sorted(seen) == ["KeyError 'a bug'"] + ["RankFailedError rank 1 failed with an error of its own"] * 2


def test_typed_errors_of_work_are_everyones() -> None:
    seen: list[str] = []

    def attempt(group: TensorParallelGroup) -> None:
        def work() -> None:
            if group.rank > 0:
                raise CheckpointError(f"from rank {group.rank}")

        try:
            work_together(group, work)
        except CheckpointError as error:
            seen.append(str(error))

    on_ranks(3, attempt)
    assert seen == ["from rank 1"] * 3
    assert torch.is_grad_enabled()
