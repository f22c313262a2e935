"""What a capture has seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from tp.config import ModelConfig
from tp.errors import RequestError
from tp.inspection.points import describe, site_of
from tp.layers.tap import Site

T = TypeVar("T")


@dataclass(frozen=True)
class CapturedTokens:
    """Where captured rows come from; each [R] int64, on the CPU.

    Attributes:
        forward: which forward of the model, from 0.
        sequence: its place in that forward's batch.
        slot: its row of the KV cache, the same from step to step; 0 in forwards without a cache.
        position: of the token in its own sequence.
        token_id: which token.
    """

    forward: Tensor
    sequence: Tensor
    slot: Tensor
    position: Tensor
    token_id: Tensor

    def __len__(self) -> int:
        return len(self.position)


@dataclass
class ForwardRecord:
    """What was captured of one forward.

    Attributes:
        tokens: of all ranks.
        own_rows: [R] int64: which of them `values` has of points of the stream.
        values, gradients: by site, see `ActivationCache`.
        patterns: by site, of each sequence.
    """

    tokens: CapturedTokens
    own_rows: Tensor
    values: dict[Site, Tensor] = field(default_factory=dict)
    gradients: dict[Site, Tensor] = field(default_factory=dict)
    patterns: dict[Site, list[Tensor]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the captured values, patterns and gradients."""
        patterns = [pattern for of_site in self.patterns.values() for pattern in of_site]
        return sum(tensor.nbytes for tensor in [*self.values.values(), *self.gradients.values(), *patterns])


@dataclass
class ActivationCache:
    """Captured values: copies, without gradients, in the model's dtype. Reading them needs no other rank.

    `cache["attn_out", 3]` (or `cache["embed"]`) is [R, D], a row for each captured token, forwards one after the other;
    `cache["z", 3]` is [R, H, head_dim]; `cache["pattern", 3]` is a list with one [H, T, S], float32 at least, for each
    sequence of each forward: T captured tokens attend to S. H are the captured query heads.

    Where the capture was sharded, H are those of them that this rank has, and R, of points of the stream, `own_rows`.

    Attributes:
        config: of the model.
        heads: global indices of the captured query heads, ascending.
        sharded: whether it holds this rank's share only.
        forwards: what was captured of each forward, in order.
    """

    config: ModelConfig
    heads: tuple[int, ...]
    sharded: bool = False
    forwards: list[ForwardRecord] = field(default_factory=list)

    def __getitem__(self, key: str | tuple[str, int]) -> Any:
        """The captured value of a point: a tensor or, of "pattern", a list of tensors.

        Raises:
            RequestError: there is no such point or layer, or it was not captured.
        """
        point, layer = (key, None) if isinstance(key, str) else key
        return self.patterns(layer) if point == "pattern" else self.value(point, layer)

    def __contains__(self, key: str | tuple[str, int]) -> bool:
        """Whether `cache[key]` has a value."""
        point, layer = (key, None) if isinstance(key, str) else key
        site = site_of(point, layer, self.config)
        of_forwards = (forward.patterns if point == "pattern" else forward.values for forward in self.forwards)
        return bool(self.forwards) and all(site in of_forward for of_forward in of_forwards)

    def value(self, point: str, layer: int | None = None) -> Tensor:
        """`cache[point, layer]` of any point but "pattern"."""
        return torch.cat(self._of_every([forward.values for forward in self.forwards], point, layer, "captured"))

    def patterns(self, layer: int | None) -> list[Tensor]:
        """`cache["pattern", layer]`."""
        of_forwards = self._of_every([forward.patterns for forward in self.forwards], "pattern", layer, "captured")
        return [pattern for of_forward in of_forwards for pattern in of_forward]

    def gradient(self, point: str, layer: int | None = None) -> Tensor:
        """dL/d of `cache[point, layer]`, of the same shape: the sum of the backward passes so far.

        Raises:
            RequestError: there is no such point or layer, or not every forward's was reached by a backward pass.
        """
        if point == "pattern":
            raise RequestError("attention patterns are captured without gradients: take those of z")
        of_forwards = [forward.gradients for forward in self.forwards]
        return torch.cat(self._of_every(of_forwards, point, layer, "reached by a gradient"))

    @property
    def tokens(self) -> CapturedTokens:
        """Where each captured row comes from; of all ranks' rows."""
        nothing = torch.zeros(0, dtype=torch.int64)
        columns = (
            [getattr(forward.tokens, column.name) for forward in self.forwards] for column in fields(CapturedTokens)
        )
        return CapturedTokens(*(torch.cat([nothing, *column]) for column in columns))

    @property
    def own_rows(self) -> Tensor:
        """[R] int64: which of `tokens` the rows of points of the stream are; all, unless the capture was sharded."""
        own, before = [torch.zeros(0, dtype=torch.int64)], 0
        for forward in self.forwards:
            own.append(before + forward.own_rows)
            before += len(forward.tokens)
        return torch.cat(own)

    @property
    def nbytes(self) -> int:
        """Bytes of the captured values, patterns and gradients."""
        return sum(forward.nbytes for forward in self.forwards)

    def _of_every(self, of_forwards: Sequence[Mapping[Site, T]], point: str, layer: int | None, how: str) -> list[T]:
        site = site_of(point, layer, self.config)
        found = [of_forward[site] for of_forward in of_forwards if site in of_forward]
        if not found or len(found) < len(of_forwards):
            raise RequestError(f"{describe(site)} was {how} in {len(found)} of {len(of_forwards)} forwards")
        return found
