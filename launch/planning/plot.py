"""Tokens a second against ranks, as a PNG file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tp.errors import RequestError


@dataclass(frozen=True)
class Curve:
    """Tokens a second at some degrees.

    Attributes:
        ranks, tokens_per_s: of the points.
        fits: whether the model does, at each of them; hollow where not.
    """

    label: str
    ranks: Sequence[int]
    tokens_per_s: Sequence[float]
    fits: Sequence[bool]


def draw(curves: Sequence[Curve], title: str, path: Path) -> None:
    """Writes the plot; a thin line is what the first point of each curve would become if nothing were lost.

    Raises:
        RequestError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = FigureCanvasAgg(figure).figure.add_subplot()
    for curve in curves:
        (line,) = axes.plot(curve.ranks, curve.tokens_per_s, label=curve.label)
        for ranks, rate, fits in zip(curve.ranks, curve.tokens_per_s, curve.fits, strict=True):
            face = line.get_color() if fits else "white"
            axes.plot([ranks], [rate], "o", color=line.get_color(), markerfacecolor=face)
        ideal = [curve.tokens_per_s[0] * ranks / curve.ranks[0] for ranks in curve.ranks]
        axes.plot(curve.ranks, ideal, linewidth=0.6, linestyle=":", color=line.get_color())
    every = sorted({ranks for curve in curves for ranks in curve.ranks})
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="tokens a second", title=title)
    axes.set_xticks(every, [str(ranks) for ranks in every], minor=False)
    axes.set_xticks([], minor=True)
    axes.grid(True, linewidth=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise RequestError(f"--plot {path} cannot be written: {error.strerror}") from error
