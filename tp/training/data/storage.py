"""A tokenized dataset as a directory: written as a stream, complete or not there at all, mapped into memory to read.

- token_ids.bin: the tokens of all documents, little-endian, in 2 bytes each where the vocabulary allows it, else 4
- learned.bin: one byte a token
- documents.npy: one `DOCUMENT_FIELDS` a document
- meta.json: format, type of the ids, number of tokens and documents
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import BinaryIO, Literal

import numpy as np

from tp.errors import RequestError
from tp.json_objects import read_object, typed
from tp.training.data.encoding import EncodedDocument
from tp.training.data.tokenized import DOCUMENT_FIELDS, TokenizedDataset, document_entry

FORMAT = 1

_TOKEN_IDS, _LEARNED, _DOCUMENTS, _META = "token_ids.bin", "learned.bin", "documents.npy", "meta.json"


@dataclass(frozen=True)
class _Meta:
    format: int
    token_dtype: Literal["<u2", "<u4"]
    num_tokens: int
    num_documents: int


def open_dataset(directory: Path) -> TokenizedDataset | None:
    """The dataset of a directory; None where there is none, or one that is damaged."""
    try:
        meta = typed(_Meta, read_object(directory / _META, RequestError), _META)
        documents = np.lib.format.open_memmap(directory / _DOCUMENTS, mode="r")
        token_ids = np.memmap(directory / _TOKEN_IDS, dtype=meta.token_dtype, mode="r")
        learned = np.memmap(directory / _LEARNED, dtype=np.uint8, mode="r")
        if documents.dtype != DOCUMENT_FIELDS or documents.shape != (meta.num_documents,) or meta.format != FORMAT:
            return None
        counts = {len(token_ids), len(learned), int(documents["num_tokens"].sum()), meta.num_tokens}
        least = {"num_tokens": 1, "num_bytes": 0, "highest_token_id": 0}
        if len(counts) != 1 or any(documents[name].min() < lowest for name, lowest in least.items()):
            return None
    except (OSError, EOFError, ValueError, LookupError, TypeError, ArithmeticError, TokenError, RequestError):
        return None  # numpy reads the header of documents.npy as a Python literal
    return TokenizedDataset.of_arrays(token_ids, learned, documents)


def write_dataset(directory: Path, encoded: Iterable[EncodedDocument], highest_token_id: int) -> bool:
    """Writes a dataset and gives it its name by one rename; whether there were any documents.

    Of several writers of one directory the first to finish wins, and the others throw theirs away.

    Raises:
        OSError: it cannot be written there. Nothing is left behind.
    """
    partial = directory.parent / f".{directory.name}.{uuid.uuid4().hex}"
    partial.mkdir(parents=True)
    try:
        if not _write_files(partial, encoded, "<u2" if highest_token_id < 1 << 16 else "<u4"):
            return False
        _give_name(partial, directory)
        return True
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_files(directory: Path, encoded: Iterable[EncodedDocument], token_dtype: str) -> bool:
    entries: list[tuple[int, ...]] = []
    with (directory / _TOKEN_IDS).open("wb") as token_ids, (directory / _LEARNED).open("wb") as learned:
        for document in encoded:
            token_ids.write(np.array(document.token_ids, dtype=token_dtype).tobytes())
            learned.write(np.array(document.learned, dtype=np.uint8).tobytes())
            entries.append(document_entry(document))
        _sync(token_ids)
        _sync(learned)
    documents = np.array(entries, dtype=DOCUMENT_FIELDS)
    with (directory / _DOCUMENTS).open("wb") as file:
        np.save(file, documents, allow_pickle=False)
        _sync(file)
    meta = {
        "format": FORMAT,
        "token_dtype": token_dtype,
        "num_tokens": int(documents["num_tokens"].sum()),
        "num_documents": len(documents),
    }
    with (directory / _META).open("wb") as file:
        file.write(json.dumps(meta).encode())
        _sync(file)
    return len(entries) > 0


def _give_name(partial: Path, directory: Path) -> None:
    """Renames `partial` unless a complete dataset has the name already; a damaged one gives way."""
    while True:
        try:
            partial.rename(directory)
            return
        except OSError:
            if not directory.exists():
                raise
        if open_dataset(directory) is not None:
            return
        damaged = directory.parent / f".{directory.name}.{uuid.uuid4().hex}"
        directory.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
