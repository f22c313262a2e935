"""Documents packed into rows of equal length without padding; every batch a pure function of its index.

Training reads an endless stream: epoch 0, epoch 1, …, each of them all documents in an order of its own, one after the
other, so that no token is left over at the end of an epoch. Row r is the L tokens from position r·L of the stream
on; the label of each is the token after it, which for the last one of a row is the first of the next row. So every
token of an epoch is a label once (but for the very first of the stream, which nothing precedes).

A label counts if its token is learned. With `attend_across_documents` a row is one sequence, and the label of the last
token of a document is the first of the next (as in nanoGPT and in transformers' run_clm). Without it each piece of a
document within a row is a sequence of its own, whose positions begin at 0, and a document's first token is no label.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tp.errors import RequestError
from tp.layers.step import SequenceSlice, Step
from tp.training.cross_entropy import IGNORE_INDEX
from tp.training.data.order import shuffled
from tp.training.data.tokenized import Booleans, Integers, TokenizedDataset


@dataclass(frozen=True)
class TrainingBatch:
    """A flattened micro-batch.

    Attributes:
        token_ids: [N] int64.
        labels: [N] int64: the token that each should predict, or IGNORE_INDEX.
        sequence_lengths: of the sequences that the N tokens fall into, in order.
    """

    token_ids: Tensor
    labels: Tensor
    sequence_lengths: tuple[int, ...]

    @property
    def num_labels(self) -> int:
        """Labels that count."""
        return int((self.labels != IGNORE_INDEX).sum())

    def step(self, dropout_seed: int | None = None) -> Step:
        """What a model's forward takes; on the device that the batch is on."""
        return Step(self.token_ids, tuple(map(SequenceSlice, self.sequence_lengths)), dropout_seed)

    def to(self, device: torch.device | str) -> TrainingBatch:
        return TrainingBatch(self.token_ids.to(device), self.labels.to(device), self.sequence_lengths)


class PackedBatches:
    """Micro-batches for training, for one data-parallel rank.

    Micro-batch i of data-parallel rank r is rows [(i·size + r)·batch_size, (i·size + r + 1)·batch_size). So a step
    of A micro-batches on each of `size` ranks reads the A·size·batch_size rows after those of the step before, and
    reads the same ones whichever way that product is divided.

    Args:
        dataset: what to read; every rank the same.
        sequence_length: L, tokens a row.
        batch_size: rows a micro-batch.
        seed: fixes the order of the documents in every epoch.
        data_parallel_rank, data_parallel_size: this rank's share; ranks of one tensor-parallel group share one.
        attend_across_documents: whether a row is one sequence, or one a piece of a document.

    Raises:
        RequestError: a length, size or rank out of range, or fewer than two tokens.
    """

    def __init__(
        self,
        dataset: TokenizedDataset,
        sequence_length: int,
        batch_size: int,
        *,
        seed: int = 0,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        attend_across_documents: bool = True,
    ) -> None:
        self._share = _Share(sequence_length, batch_size, data_parallel_rank, data_parallel_size)
        self._share.check(dataset)
        self._dataset = dataset
        self._seed = seed
        self._across = attend_across_documents
        self._epochs: dict[int, _Stream] = {}  # of the last batches; made anew where another is asked for

    @property
    def dataset(self) -> TokenizedDataset:
        return self._dataset

    def batch(self, index: int) -> TrainingBatch:
        """Micro-batch `index` of this rank, for any index from 0 on."""
        rows = self._share.rows(index)
        length = self._share.sequence_length
        return _packed(self._read(rows.start * length, rows.stop * length + 1), length, self._across)

    def epochs_before(self, index: int) -> float:
        """How often the dataset has been read when micro-batch `index` begins, all ranks together."""
        share = self._share
        return index * share.size * share.batch_size * share.sequence_length / self._dataset.num_tokens

    def _read(self, start: int, stop: int) -> _Window:
        windows = []
        total = self._dataset.num_tokens
        for epoch in range(start // total, (stop - 1) // total + 1):
            base = epoch * total
            windows.append(self._epoch(epoch).read(max(start - base, 0), min(stop - base, total)))
        return _joined(windows)

    def _epoch(self, epoch: int) -> _Stream:
        if epoch not in self._epochs:
            self._epochs = {epoch - 1: self._epochs[epoch - 1]} if epoch - 1 in self._epochs else {}
            order = shuffled(self._dataset.num_documents, self._seed, epoch)
            self._epochs[epoch] = _Stream(self._dataset.part(order))
        return self._epochs[epoch]


class EvaluationBatches:
    """All rows of a dataset once, documents in the order of reading, dealt out to data-parallel ranks in turn.

    The last row is as long as what is left. Every rank has the same number of batches, so that collectives match: one
    for which no rows are left gets a batch of a single token without a label. Arguments and errors as `PackedBatches`.
    """

    def __init__(
        self,
        dataset: TokenizedDataset,
        sequence_length: int,
        batch_size: int,
        *,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        attend_across_documents: bool = True,
    ) -> None:
        self._share = _Share(sequence_length, batch_size, data_parallel_rank, data_parallel_size)
        self._share.check(dataset)
        self._across = attend_across_documents
        self._stream = _Stream(dataset)
        self._num_inputs = dataset.num_tokens - 1  # nothing follows the last token

    def __len__(self) -> int:
        """Batches of each rank."""
        return -(-self._num_inputs // (self._share.sequence_length * self._share.batch_size * self._share.size))

    def __iter__(self) -> Iterator[TrainingBatch]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> TrainingBatch:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        length = self._share.sequence_length
        rows = self._share.rows(index)
        start, stop = rows.start * length, min(rows.stop * length, self._num_inputs)
        if start >= stop:
            nothing = torch.full((1,), IGNORE_INDEX)
            return TrainingBatch(torch.from_numpy(self._stream.read(0, 1).token_ids), nothing, (1,))
        return _packed(self._stream.read(start, stop + 1), length, self._across)


class _Share(NamedTuple):
    """Which rows a data-parallel rank reads."""

    sequence_length: int
    batch_size: int
    rank: int
    size: int

    def rows(self, index: int) -> range:
        first = (index * self.size + self.rank) * self.batch_size
        return range(first, first + self.batch_size)

    def check(self, dataset: TokenizedDataset) -> None:
        if self.sequence_length < 1 or self.batch_size < 1:
            raise RequestError(f"rows of {self.sequence_length} tokens, {self.batch_size} a batch: less than one")
        if not 0 <= self.rank < self.size:
            raise RequestError(f"data-parallel rank {self.rank} of {self.size}: ranks count from 0")
        if dataset.num_tokens < 2:
            raise RequestError(f"a dataset of {dataset.num_tokens} tokens: there is nothing to predict")


class _Window(NamedTuple):
    """Consecutive tokens of a stream."""

    token_ids: Integers
    learned: Booleans
    begins: Booleans
    """Whether a token is the first of its document."""


class _Stream:
    """The documents of a dataset one after the other."""

    def __init__(self, dataset: TokenizedDataset) -> None:
        self._dataset = dataset
        self._stops = np.cumsum(dataset.lengths, dtype=np.int64)

    def read(self, start: int, stop: int) -> _Window:
        """Tokens [start, stop) of the stream, which has that many."""
        pieces = []
        while start < stop:
            index = int(np.searchsorted(self._stops, start, side="right"))
            end = int(self._stops[index])
            first = end - int(self._dataset.lengths[index])
            ids, learned = self._dataset.read(index, start - first, min(stop, end) - first)
            pieces.append(_Window(ids, learned, np.arange(start, start + len(ids)) == first))
            start += len(ids)
        return _joined(pieces)


def _joined(windows: list[_Window]) -> _Window:
    return _Window(*(np.concatenate(arrays) for arrays in zip(*windows, strict=True)))


def _packed(window: _Window, sequence_length: int, across: bool) -> TrainingBatch:
    """Rows of a window that reaches one token beyond the last of them."""
    counts = window.learned[1:] if across else window.learned[1:] & ~window.begins[1:]
    labels = np.where(counts, window.token_ids[1:], IGNORE_INDEX)
    num_tokens = len(labels)
    first_of_sequence = np.arange(num_tokens) % sequence_length == 0
    if not across:
        first_of_sequence |= window.begins[:-1]
    edges = np.append(np.flatnonzero(first_of_sequence), num_tokens)
    lengths = tuple(np.diff(edges).tolist())
    return TrainingBatch(torch.from_numpy(window.token_ids[:-1].copy()), torch.from_numpy(labels), lengths)
