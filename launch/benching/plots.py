"""Charts as PNG files. Each holds the numbers that it was drawn from, so that it can be told whether it is theirs."""

from __future__ import annotations

import io
import json
import math
from typing import TYPE_CHECKING, Any

from launch.benching.charts import BarPanel, Chart, LinePanel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DATA = "Data"
"""Keyword of the PNG's text that holds the chart's numbers, as JSON."""
DOTS_PER_INCH = 110
MOST_COLUMNS = 3
COMPUTE_COLOUR, COMMUNICATION_COLOUR = "#0969da", "#c24e00"
MARKERS = {"replicate": "o", "sharded": "s"}


def draw(chart: Chart) -> bytes:
    """A PNG file. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(MOST_COLUMNS, len(chart.panels))
    lines = math.ceil(len(chart.panels) / columns)
    figure = Figure(figsize=(0.6 + 4.4 * columns, 0.7 + 3.6 * lines), dpi=DOTS_PER_INCH, layout="constrained")
    figure.suptitle(chart.title, fontsize=10)
    places = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes, panel in zip(places, chart.panels, strict=False):
        if isinstance(panel, LinePanel):
            _draw_lines(axes, panel)
        elif isinstance(panel, BarPanel):
            _draw_bars(axes, panel)
    for axes in places[len(chart.panels) :]:
        axes.axis("off")
    if isinstance(chart.panels[0], BarPanel):
        figure.legend(handles=places[0].containers[:2], loc="outside lower center", ncols=2, fontsize=8)
    drawn = io.BytesIO()
    FigureCanvasAgg(figure).print_png(drawn, metadata={DATA: json.dumps(chart.to_json())})
    return drawn.getvalue()


def data_of(png: bytes) -> Any:
    """The numbers that a picture was drawn from; None for one that holds none."""
    from PIL import Image

    text = getattr(Image.open(io.BytesIO(png)), "text", {}).get(DATA)
    return None if text is None else json.loads(text)


def _draw_lines(axes: Axes, panel: LinePanel) -> None:
    degrees = [t for t, _ in panel.ideal]
    axes.plot(degrees, [value for _, value in panel.ideal], color="0.6", linestyle=":", label="ideal")
    for line in panel.lines:
        below = [median - low for median, low in zip(line.medians, line.lower_quartiles, strict=True)]
        above = [high - median for median, high in zip(line.medians, line.upper_quartiles, strict=True)]
        marker = MARKERS[line.label.partition(":")[0]]
        axes.errorbar(
            line.degrees, line.medians, yerr=[below, above], marker=marker, markersize=4, capsize=3, label=line.label
        )
    axes.set_xticks(degrees)
    axes.set_xlabel("ranks (t)")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    _finish(axes, panel)


def _draw_bars(axes: Axes, panel: BarPanel) -> None:
    labels = [bar.label for bar in panel.bars]
    compute = [bar.compute for bar in panel.bars]
    axes.bar(labels, compute, 0.6, color=COMPUTE_COLOUR, label="compute")
    axes.bar(
        labels,
        [bar.communication for bar in panel.bars],
        0.6,
        bottom=compute,
        color=COMMUNICATION_COLOUR,
        label="in collectives, waiting included",
    )
    totals = [bar.compute + bar.communication for bar in panel.bars]
    below = [total - bar.minimum for total, bar in zip(totals, panel.bars, strict=True)]
    above = [bar.maximum - total for total, bar in zip(totals, panel.bars, strict=True)]
    axes.errorbar(labels, totals, yerr=[below, above], fmt="none", ecolor="0.3", capsize=3, linewidth=1)
    axes.tick_params(axis="x", labelsize=7)
    _finish(axes, panel)


def _finish(axes: Axes, panel: LinePanel | BarPanel) -> None:
    axes.set_title(panel.title, fontsize=9)
    axes.set_ylabel(panel.y_label)
    axes.grid(axis="y", alpha=0.3)
