"""Files to a tokenized dataset, once: by one rank for all, and kept for the next run."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tp.cache_directory import cache_directory
from tp.checkpoint.together import work_together
from tp.errors import CapacityError, RequestError
from tp.parallel.group import TensorParallelGroup
from tp.training.data.documents import SEPARATOR, is_jsonl, read_documents
from tp.training.data.encoding import DocumentEncoder, EncodedDocument
from tp.training.data.storage import FORMAT, open_dataset, write_dataset
from tp.training.data.tokenized import TokenizedDataset

Progress = Callable[[int, int], None]

_HASH_BYTES = 1 << 20


def default_cache_directory() -> Path:
    """Where tokenized datasets are kept."""
    return cache_directory() / "tokenized"


def tokenize_files(
    paths: Sequence[str | Path],
    tokenizer: Any,
    group: TensorParallelGroup,
    *,
    eos_token_ids: Sequence[int] = (),
    separator: str = SEPARATOR,
    cache_directory: str | Path | None = None,
    progress: Progress | None = None,
) -> TokenizedDataset:
    """The documents of files, tokenized, from the cache where they are in it.

    Rank 0 reads and tokenizes, the others wait for it, then all map the same files into memory. The cache goes by the
    contents of the files (not their names or times), the tokenizer's vocabulary, rules and chat template, and the
    options. Several runs may use it at once. Where it cannot be written, a temporary directory serves this run.

    Args:
        paths: text and JSONL files, see `documents`.
        tokenizer: a transformers tokenizer, the same on all ranks; only rank 0's is used.
        group: all ranks of the run, data-parallel ones too.
        eos_token_ids: ids that end a text; the first is the one that is written. By default the tokenizer's own.
        separator: the line between the documents of a text file.
        cache_directory: one that all ranks see; by default `default_cache_directory()`.
        progress: called on rank 0 with (bytes of the files that are tokenized, bytes of all).

    Raises:
        RequestError: a file that cannot be read, a line that is no document, files without any document, a cache
            directory that some rank does not see. CapacityError: no disk has room. On all ranks together.
    """
    cache = default_cache_directory() if cache_directory is None else Path(cache_directory)

    def prepare() -> Path | None:
        if group.rank != 0:
            return None
        source = _Source(tuple(map(Path, paths)), DocumentEncoder(tokenizer, eos_token_ids), separator, progress)
        return _find_or_make(source, cache)

    directory: Path = group.communicator.all_gather_object(work_together(group, prepare))[0]
    try:
        return group.agree(lambda: _open(directory, group))
    finally:
        if group.rank == 0 and directory.parent != cache.absolute():
            shutil.rmtree(directory.parent, ignore_errors=True)  # what is mapped stays readable until it is let go


class _Source:
    """Files and what makes tokens of them."""

    def __init__(
        self, paths: tuple[Path, ...], encoder: DocumentEncoder, separator: str, progress: Progress | None
    ) -> None:
        if not paths:
            raise RequestError("no files to train on were named")
        self._paths = paths
        self._encoder = encoder
        self._separator = separator
        self._progress = progress
        self.key = self._hash()
        vocabulary: dict[str, int] = encoder.tokenizer.get_vocab()
        self.highest_token_id = max(*vocabulary.values(), *encoder.eos_token_ids)

    def encoded(self) -> Iterator[EncodedDocument]:
        """All documents, reporting on the way how far the files have been read."""
        report = _Report(sum(path.stat().st_size for path in self._paths), self._progress)
        yield from self._encoder.encode_all(read_documents(self._paths, self._separator, report.advance))
        report.finish()

    def no_documents(self) -> RequestError:
        return RequestError(f"{', '.join(map(str, self._paths))}: no documents there, nothing but blank lines")

    def _hash(self) -> str:
        options = [FORMAT, self._separator, self._encoder.eos_token_ids, self._encoder.begin_ids]
        key = hashlib.sha256(json.dumps(options).encode())
        key.update(_tokenizer_hash(self._encoder.tokenizer))
        for path in self._paths:
            key.update(b"jsonl" if is_jsonl(path) else b"text")
            key.update(_file_hash(path))
        return key.hexdigest()[:32]


class _Report:
    """Calls `progress` about a hundred times over all bytes."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._done = self._reported = 0

    def advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._done - self._reported >= self._total / 100:
            self.finish()

    def finish(self) -> None:
        """Reports what has been done so far."""
        self._reported = self._done
        if self._progress is not None:
            self._progress(self._done, self._total)


def _find_or_make(source: _Source, cache: Path) -> Path:
    """The directory of the dataset: in the cache, or beneath a new temporary directory."""
    directory = cache.absolute() / source.key
    if open_dataset(directory) is not None:
        return directory
    try:
        made = write_dataset(directory, source.encoded(), source.highest_token_id)
    except OSError as error:
        warnings.warn(
            f"{cache} cannot be written ({error.strerror or error}): this run tokenizes into a temporary directory",
            stacklevel=2,
        )
        directory, made = _make_temporarily(source)
    if not made:
        raise source.no_documents()
    return directory


def _make_temporarily(source: _Source) -> tuple[Path, bool]:
    try:
        directory = Path(tempfile.mkdtemp(prefix="tp-decoder-")) / source.key
        try:
            return directory, write_dataset(directory, source.encoded(), source.highest_token_id)
        except BaseException:
            shutil.rmtree(directory.parent, ignore_errors=True)
            raise
    except OSError as error:
        raise CapacityError(
            f"tokenized files cannot be kept in {tempfile.gettempdir()} either ({error.strerror or error}): "
            "name a cache directory with room"
        ) from error


def _open(directory: Path, group: TensorParallelGroup) -> TokenizedDataset:
    dataset = open_dataset(directory)
    if dataset is None:
        raise RequestError(f"rank {group.rank} cannot read {directory}: name a cache directory that all ranks see")
    return dataset


def _file_hash(path: Path) -> bytes:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_HASH_BYTES):
                digest.update(block)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.digest()


def _tokenizer_hash(tokenizer: Any) -> bytes:
    """Of all that decides what becomes of a text: vocabulary, merges, normalisation, special tokens, template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else tokenizer.get_vocab()
    rest = [type(tokenizer).__name__, tokenizer.special_tokens_map, getattr(tokenizer, "chat_template", None)]
    return hashlib.sha256(json.dumps([rules, rest], sort_keys=True, default=str).encode()).digest()
