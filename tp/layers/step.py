"""One forward's worth of tokens, flattened: what to compute, where it sits, and nothing about requests."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from tp.errors import RequestError


@dataclass(frozen=True)
class SequenceSlice:
    """Consecutive tokens of one sequence within a step.

    Attributes:
        length: tokens of the sequence in this step.
        start: its tokens that are in the cache already; the position of the first token here.
        slot: its row of the cache.
        total: tokens of the sequence that are known so far; the whole prompt while a chunk of it is processed. Only
            the "dynamic" rope type looks at it. 0 stands for start + length.
    """

    length: int
    start: int = 0
    slot: int = 0
    total: int = 0

    @property
    def known_length(self) -> int:
        return max(self.total, self.start + self.length)


@dataclass(frozen=True)
class Step:
    """A flattened batch without padding: the tokens of its sequences one after the other.

    Attributes:
        token_ids: [N] int64.
        sequences: the slices that the N tokens fall into, in order.
        dropout_seed: of this training step, equal on all ranks; None where nothing is dropped.
    """

    token_ids: Tensor
    sequences: tuple[SequenceSlice, ...]
    dropout_seed: int | None = None

    def __post_init__(self) -> None:
        if self.token_ids.dim() != 1 or sum(piece.length for piece in self.sequences) != len(self.token_ids):
            lengths = [piece.length for piece in self.sequences]
            raise RequestError(f"a step of token_ids {tuple(self.token_ids.shape)} cannot hold sequences of {lengths}")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def decodes(self) -> bool:
        """Whether every sequence has one token in this step."""
        return len(self.sequences) == self.num_tokens

    @functools.cached_property
    def slots(self) -> Tensor:
        """[B] int64: the row of the cache of each sequence."""
        return torch.tensor([piece.slot for piece in self.sequences], device=self.token_ids.device)

    @functools.cached_property
    def starts(self) -> Tensor:
        """[B] int64: the tokens of each sequence that are in the cache already."""
        return torch.tensor([piece.start for piece in self.sequences], device=self.token_ids.device)

    def positions(self) -> Tensor:
        """[N] int64: each token's position in its own sequence."""
        if self.decodes:
            return self.starts
        device = self.token_ids.device
        return torch.cat([torch.arange(s.start, s.start + s.length, device=device) for s in self.sequences])

    def rows(self) -> list[range]:
        """Rows of the flattened batch that each sequence takes."""
        stops = [0]
        for piece in self.sequences:
            stops.append(stops[-1] + piece.length)
        return [range(start, stop) for start, stop in itertools.pairwise(stops)]

    def last_rows(self) -> Tensor:
        """[B] int64: the row of each sequence's last token."""
        if self.decodes:
            return torch.arange(self.num_tokens, device=self.token_ids.device)
        return torch.tensor([rows.stop - 1 for rows in self.rows()], device=self.token_ids.device)

    @classmethod
    def of_decode(cls, token_ids: Tensor, slots: Tensor, starts: Tensor) -> Step:
        """One token of each of B sequences whose slots and starts only the device knows, all [B] int64."""
        unknown = SequenceSlice(1, start=-1)  # what would take it from the host fails, and writes nothing
        step = cls(token_ids, (unknown,) * len(token_ids))
        step.__dict__.update(slots=slots, starts=starts)
        return step

    @classmethod
    def from_padded(cls, input_ids: Tensor, mask: Tensor) -> Step:
        """The real tokens of a padded batch, row by row; positions count real tokens only.

        Args:
            input_ids: [B, S] int64.
            mask: [B, S] bool, True where real; each row one contiguous run, padded on the left or right.

        Raises:
            RequestError: a row without real tokens, or with padding between them.
        """
        lengths = mask.sum(-1).tolist()
        runs = (mask.int().diff(dim=-1) == 1).sum(-1) + mask[:, 0].int()
        for row, (length, run) in enumerate(zip(lengths, runs.tolist(), strict=True)):
            if length == 0 or run != 1:
                raise RequestError(f"attention_mask row {row} has {length} tokens in {run} runs: it needs one run")
        return cls(input_ids[mask], tuple(SequenceSlice(length) for length in lengths))
