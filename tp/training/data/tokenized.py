"""Tokenized documents as arrays, in memory or mapped from files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tp.errors import CheckpointError
from tp.training.data.encoding import EncodedDocument
from tp.training.data.split import divide

Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]

DOCUMENT_FIELDS = np.dtype(
    [("num_tokens", "<i8"), ("num_bytes", "<i8"), ("highest_token_id", "<i8"), ("fingerprint", "<u8")]
)
"""What is kept of every document beside its tokens."""


@dataclass(frozen=True)
class TokenizedDataset:
    """Documents as token ids. A part of a dataset is one too: it shares the arrays and has fewer documents.

    Attributes:
        token_ids: the tokens of all documents that were read, one document after the other.
        learned: one a token, nonzero where its prediction enters the loss.
        starts: [documents] int64, where each document of this dataset begins in `token_ids`.
        documents: [documents], of `DOCUMENT_FIELDS`.
        document_numbers: [documents] int64, the place of each in the order of reading, from 0.
    """

    token_ids: npt.NDArray[Any]
    learned: npt.NDArray[Any]
    starts: Integers
    documents: npt.NDArray[Any]
    document_numbers: Integers

    @classmethod
    def of_arrays(
        cls, token_ids: npt.NDArray[Any], learned: npt.NDArray[Any], documents: npt.NDArray[Any]
    ) -> TokenizedDataset:
        """The dataset of all documents in `token_ids`."""
        stops = np.cumsum(documents["num_tokens"], dtype=np.int64)
        return cls(token_ids, learned, stops - documents["num_tokens"], documents, np.arange(len(documents)))

    @classmethod
    def of_documents(cls, encoded: Iterable[EncodedDocument]) -> TokenizedDataset:
        """Encoded documents, in memory."""
        everything = list(encoded)
        return cls.of_arrays(
            np.array([token for document in everything for token in document.token_ids], dtype=np.uint32),
            np.array([mark for document in everything for mark in document.learned], dtype=np.uint8),
            np.array([document_entry(document) for document in everything], dtype=DOCUMENT_FIELDS),
        )

    @property
    def num_documents(self) -> int:
        return len(self.documents)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all documents, learned or not."""
        return int(self.lengths.sum())

    @cached_property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text that is learned: what a loss in bits is divided by to get bits per byte."""
        return int(self.documents["num_bytes"].sum())

    @property
    def lengths(self) -> Integers:
        """[documents] int64: tokens of each."""
        lengths: Integers = self.documents["num_tokens"]
        return lengths

    @cached_property
    def highest_token_id(self) -> int:
        """The largest id: a model needs a vocabulary that is larger."""
        return int(self.documents["highest_token_id"].max(initial=0))

    def read(self, index: int, start: int = 0, stop: int | None = None) -> tuple[Integers, Booleans]:
        """Token ids [start, stop) of one document, by default all of them, and which are learned.

        Raises:
            CheckpointError: an id that the document had not when it was tokenized.
        """
        base = int(self.starts[index])
        tokens = slice(base + start, base + (int(self.lengths[index]) if stop is None else stop))
        ids = self.token_ids[tokens].astype(np.int64)
        if ids.max(initial=0) > self.documents["highest_token_id"][index]:
            raise CheckpointError(
                f"document {index} of the tokenized data holds id {ids.max()}, beyond its highest "
                f"({self.documents['highest_token_id'][index]}): the files are damaged, remove them from the data cache"
            )
        return ids, self.learned[tokens].astype(np.bool_)

    def part(self, chosen: Integers | Booleans) -> TokenizedDataset:
        """The documents with these indices, in this order (or where a mask is True)."""
        return TokenizedDataset(
            self.token_ids,
            self.learned,
            self.starts[chosen],
            self.documents[chosen],
            self.document_numbers[chosen],
        )

    def split(self, fraction: float, seed: int = 0) -> tuple[TokenizedDataset, TokenizedDataset]:
        """(training part, held-out part), as `split_documents` divides the documents, whatever the tokenizer.

        Raises:
            RequestError: as `split_documents`.
        """
        training, held_out = divide(self.documents["fingerprint"], fraction, seed)
        return self.part(training), self.part(held_out)


def document_entry(document: EncodedDocument) -> tuple[int, ...]:
    """A document's `DOCUMENT_FIELDS`."""
    return len(document.token_ids), document.num_bytes, max(document.token_ids), document.fingerprint
