"""The report's plots as PNG files, for documents."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launch.inspection import charts, table
from launch.inspection.charts import Chart, HeatMap, Series, Values
from launch.inspection.findings import Attribution, Findings, state_names
from launch.inspection.token_text import TokenTexts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Mapping[str, str] = {"stream": "#1a7f37", "embedding": "#6e7781", "attention": "#0969da", "mlp": "#c24e00"}
"""By role, as in the report's light scheme."""
DOTS_PER_INCH = 110


def figures(findings: Findings, texts: TokenTexts) -> dict[str, bytes]:
    """PNG files by name. Needs matplotlib. Dashed: the first position; a band: the range of the others."""
    drawn = {"norms.png": _norms(findings), "lens.png": _lens(findings, texts)}
    if findings.attribution is not None:
        drawn["contributions.png"] = _contributions(findings, findings.attribution, texts)
    return {name: _png(figure) for name, figure in drawn.items()}


def _norms(findings: Findings) -> Figure:
    figure = _figure(13.0, 3.6)
    for axes, chart in zip(figure.subplots(1, 3), charts.norm_charts(findings), strict=True):
        for series in chart.series:
            _line(axes, series)
        _label(axes, chart)
    lines = {str(line.get_label()): line for axes in figure.axes for line in axes.lines}
    lines = {label: line for label, line in lines.items() if not label.startswith("_")}
    figure.legend(handles=list(lines.values()), loc="outside lower center", ncols=len(lines), fontsize=8)
    return figure


def _contributions(findings: Findings, attribution: Attribution, texts: TokenTexts) -> Figure:
    heads = charts.head_map(attribution)
    places = len(heads.x_labels)
    figure = _figure(max(7.0, 2.0 + 0.27 * places), 6.4 + 0.16 * len(heads.y_labels))
    figure.suptitle(f"What makes {table.logit_name(findings, texts)} (final norm's scale held)", parse_math=False)
    bars, sums, map_ = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1.5, 0.4 + 0.17 * len(heads.y_labels)])
    chart = charts.contribution_chart(attribution)
    for series, shift in zip(chart.series, (0.0, -0.2, 0.2), strict=True):
        heights = [0.0 if value is None else value for value in series.values]
        centres = [place + shift for place in range(places)]
        bars.bar(centres, heights, 0.38, color=COLOURS[series.role], label=series.name)
    bars.legend(fontsize=8)
    _label(bars, chart)
    bars.set_xlabel("")
    total = charts.sum_chart(attribution)
    _line(sums, total.series[0])
    _label(sums, total)
    sums.set_xlabel("")
    _heat(figure, map_, heads)
    return figure


def _heat(figure: Figure, axes: Axes, heads: HeatMap) -> None:
    values = [_or_nan(row) for row in heads.values]
    image = axes.imshow(values, cmap="PRGn", vmin=-heads.largest, vmax=heads.largest, aspect="auto")
    figure.colorbar(image, ax=axes, location="bottom", shrink=0.4, aspect=40, label="logit")
    axes.set_title(heads.title, fontsize=9)
    axes.set_xlabel("layer")
    axes.set_ylabel("head")
    axes.set_yticks(range(len(heads.y_labels)), heads.y_labels, fontsize=7)
    _ticks(axes, heads.x_labels)


def _lens(findings: Findings, texts: TokenTexts) -> Figure:
    """The grid of the report, shaded by probability; labels cut to what a cell holds."""
    names = state_names(len(findings.layers))
    columns = len(findings.positions)
    figure = _figure(1.5 + 0.95 * columns, 1.2 + 0.22 * len(names))
    axes = figure.subplots()
    shades = [[cell.probabilities[0] for cell in state] for state in findings.lens]
    image = axes.imshow(shades, cmap="Blues", vmin=0, vmax=1.4, aspect="auto")
    for row, state in enumerate(findings.lens):
        for column, cell in enumerate(state):
            is_final = cell.token_ids[0] == findings.lens[-1][column].token_ids[0]
            text = _cut(texts.label(cell.token_ids[0]))
            weight = "bold" if is_final else "normal"
            axes.text(column, row, text, ha="center", va="center", fontsize=7, weight=weight, parse_math=False)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    heads = [f"{position}\n{_cut(texts.label(findings.token_ids[position]))}" for position in findings.positions]
    axes.set_xticks(range(columns), heads, fontsize=7, parse_math=False)
    axes.xaxis.tick_top()
    axes.set_ylabel("layer")
    bar = figure.colorbar(
        image, ax=axes, location="bottom", shrink=0.6, aspect=40, boundaries=[n / 50 for n in range(51)]
    )
    bar.set_label("probability of the likeliest next token; bold: the final answer", fontsize=8)
    bar.set_ticks([0, 0.5, 1])
    return figure


def _line(axes: Axes, series: Series) -> None:
    values = _or_nan(series.values)
    style: dict[str, Any] = {"linestyle": "--"} if series.of_first else {}
    axes.plot(values, color=COLOURS[series.role], linewidth=1.3, marker=".", markersize=3, label=series.label, **style)
    if series.spread is not None:
        lowest, highest = map(_or_nan, series.spread)
        axes.fill_between(range(len(values)), lowest, highest, color=COLOURS[series.role], alpha=0.16, linewidth=0)


def _label(axes: Axes, chart: Chart) -> None:
    axes.set_title(chart.title, fontsize=9)
    axes.set_ylabel(chart.y_label)
    axes.set_xlabel("layer")
    axes.grid(alpha=0.3)
    if chart.is_logarithmic:
        axes.set_yscale("log")
    else:
        axes.axhline(0, color="0.4", linewidth=0.8)
    _ticks(axes, chart.x_labels)


def _ticks(axes: Axes, labels: Sequence[str]) -> None:
    every = max(1, round(len(labels) / 12))
    marked = [place for place, label in enumerate(labels) if label == "embed" or int(label) % every == 0]
    if labels[0] == "embed" and every > 1:
        marked.remove(1)  # too near
    axes.set_xticks(marked, [labels[place] for place in marked], fontsize=7)


def _or_nan(values: Values) -> list[float]:
    """What matplotlib leaves out where there is no value."""
    return [float("nan") if value is None else value for value in values]


def _cut(label: str, most: int = 11) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")


def _png(figure: Figure) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    drawn = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # it draws a box instead
        FigureCanvasAgg(figure).print_png(drawn)
    return drawn.getvalue()
