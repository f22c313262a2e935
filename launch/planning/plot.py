"""Tokens a second against ranks, as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Curve:
    """Tokens a second at some degrees.

    Attributes:
        label: of the model.
        ranks, tokens_per_s: of the points.
        fits: whether the model does, at each of them; hollow where not.
        ranges: of each point, the least and the most that it may be; empty: nothing is said of that.
    """

    label: str
    ranks: Sequence[int]
    tokens_per_s: Sequence[float]
    fits: Sequence[bool]
    ranges: Sequence[tuple[float, float]] = ()


def draw(curves: Sequence[Curve], title: str) -> bytes:
    """A PNG file. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure, drawn = figure_of(curves, title), io.BytesIO()
    FigureCanvasAgg(figure).print_png(drawn)
    return drawn.getvalue()


def figure_of(curves: Sequence[Curve], title: str) -> Figure:
    """The picture, before it is one of pixels."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for number, curve in enumerate(curves):
        _draw_curve(axes, curve, f"C{number}")
    every = sorted({ranks for curve in curves for ranks in curve.ranks})
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="tokens a second", title=title)
    axes.set_xticks(every, [str(ranks) for ranks in every], minor=False)
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, linewidth=0.3)
    _add_legend(axes, curves)
    return figure


def _draw_curve(axes: Axes, curve: Curve, colour: str) -> None:
    axes.plot(curve.ranks, curve.tokens_per_s, color=colour, label=curve.label)
    if curve.ranges:
        lowest, highest = zip(*curve.ranges, strict=True)
        axes.fill_between(curve.ranks, lowest, highest, color=colour, alpha=0.15, linewidth=0)
    for ranks, rate, fits in zip(curve.ranks, curve.tokens_per_s, curve.fits, strict=True):
        axes.plot([ranks], [rate], "o", color=colour, markerfacecolor=colour if fits else "white")
    ideal = [curve.tokens_per_s[0] * ranks / curve.ranks[0] for ranks in curve.ranks]
    axes.plot(curve.ranks, ideal, linewidth=0.8, linestyle=":", color=colour)


def _add_legend(axes: Axes, curves: Sequence[Curve]) -> None:
    """The models, then what is drawn alike for all of them, in grey."""
    from matplotlib.artist import Artist
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Artist] = list(axes.get_legend_handles_labels()[0])
    handles.append(Line2D([], [], color="0.4", linestyle=":", linewidth=0.8, label="if nothing were lost"))
    if not all(fits for curve in curves for fits in curve.fits):
        handles.append(
            Line2D([], [], color="0.4", marker="o", markerfacecolor="white", linestyle="", label="does not fit")
        )
    if any(curve.ranges for curve in curves):
        handles.append(Patch(color="0.4", alpha=0.2, linewidth=0, label="range of the prediction"))
    axes.legend(handles=handles)
