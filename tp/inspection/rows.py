"""Which tokens of a step are meant by positions, and which of them a rank holds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tp.layers.layout import Layout, ShardTokens
from tp.layers.step import Step
from tp.parallel.partition import chunk_ranges


@dataclass(frozen=True)
class Rows:
    """Chosen tokens of a step, in its order.

    Attributes:
        numbers: their rows in the step, ascending.
        indices: the same, [R] int64 on the step's device.
        entries: [R] int64: which of the positions chose each; its row where all are chosen.
    """

    numbers: Sequence[int]
    indices: Tensor
    entries: Tensor

    def __len__(self) -> int:
        return len(self.numbers)

    def within(self, tokens: range) -> slice:
        """Those among consecutive tokens of the step, as a slice of this."""
        return slice(bisect_left(self.numbers, tokens.start), bisect_left(self.numbers, tokens.stop))

    def of_rank(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """This rank's share: rows of its own tokens, and their entries."""
        tokens = own_tokens(layout)
        share = self.within(tokens)
        return self.indices[share] - tokens.start, self.entries[share]

    def sizes(self, layout: Layout) -> list[int]:
        """How many each rank holds where tokens are sharded."""
        shares = [self.within(tokens) for tokens in chunk_ranges(layout.num_tokens, layout.group.size)]
        return [share.stop - share.start for share in shares]


def rows_at(step: Step, positions: Sequence[int] | None) -> Rows:
    """The tokens of a step at some positions.

    Args:
        positions: in each token's own sequence; negative ones count from the end of the sequence's tokens in the step.
            None: all tokens. Where two name the same token, the first counts.
    """
    device = step.token_ids.device
    if positions is None:
        everything = torch.arange(step.num_tokens, device=device)
        return Rows(range(step.num_tokens), everything, everything)
    numbers: list[int] = []
    entries: list[int] = []
    for piece, rows in zip(step.sequences, step.rows(), strict=True):
        chosen: dict[int, int] = {}
        for entry, position in enumerate(positions):
            offset = position - piece.start if position >= 0 else piece.length + position
            if 0 <= offset < piece.length:
                chosen.setdefault(rows.start + offset, entry)
        numbers += sorted(chosen)
        entries += [chosen[number] for number in sorted(chosen)]
    indices, of_positions = torch.tensor([numbers, entries], dtype=torch.int64, device=device).unbind(0)
    return Rows(numbers, indices, of_positions)


def own_tokens(layout: Layout) -> range:
    """The tokens of the step that this rank's share of the stream consists of."""
    return layout.tokens if isinstance(layout, ShardTokens) else range(layout.num_tokens)
