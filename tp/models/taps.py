"""Several taps at one model: each sees what those before it let pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from tp.layers.layout import Layout
from tp.layers.step import Step
from tp.layers.tap import Site, Tap
from tp.models.causal_lm import CausalLM


@dataclass(frozen=True)
class Taps(Tap):
    """Taps in the order in which they were attached."""

    taps: tuple[Tap, ...]

    def on_step(self, step: Step) -> Tap:
        return Taps(tuple(tap.on_step(step) for tap in self.taps))

    def on_stream(self, site: Site, value: Tensor, layout: Layout) -> Tensor:
        for tap in self.taps:
            value = tap.on_stream(site, value, layout)
        return value

    def on_heads(self, layer: int, z_NHd: Tensor, heads: range) -> Tensor:
        for tap in self.taps:
            z_NHd = tap.on_heads(layer, z_NHd, heads)
        return z_NHd

    def wants_pattern(self, layer: int) -> bool:
        return any(tap.wants_pattern(layer) for tap in self.taps)

    def on_pattern(self, layer: int, sequence: int, pattern_HTS: Tensor, heads: range) -> None:
        for tap in self.taps:
            tap.on_pattern(layer, sequence, pattern_HTS, heads)


@contextmanager
def attached(model: CausalLM, tap: Tap) -> Iterator[None]:
    """Adds a tap after those that the model has, and takes it off again, in whatever order several are taken off."""
    decoder = model.model
    decoder.tap = tap if decoder.tap is None else Taps((*_taps(decoder.tap), tap))
    try:
        yield
    finally:
        left = tuple(other for other in _taps(decoder.tap) if other is not tap)
        decoder.tap = Taps(left) if len(left) > 1 else left[0] if left else None


def _taps(tap: Tap | None) -> tuple[Tap, ...]:
    return tap.taps if isinstance(tap, Taps) else () if tap is None else (tap,)
