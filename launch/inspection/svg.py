"""Plots as inline SVG. Colours are classes of the page's style sheet, so that they follow light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from launch.inspection.charts import Chart, HeatMap, Series, Values, described
from launch.inspection.findings import signed
from launch.inspection.scales import Scale, tick_text

LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 30
"""Margins of a plot, in pixels."""
LINES_WIDTH, LINES_HEIGHT = 372, 240
PLACE = 22
"""Width of a layer in the wide plots, which stand under each other."""
FEWEST_PLACES = 12
"""The wide plots are not drawn narrower than for so many."""
BARS_HEIGHT, LOW_HEIGHT, HEAD_HEIGHT = 240, 130, 15


def line_plot(chart: Chart, width: int = LINES_WIDTH, height: int = LINES_HEIGHT) -> str:
    """Lines with their spread; a place's values in its tip."""
    places = _places(len(chart.x_labels), width)
    y = _y_scale(chart, height)
    drawn = [_frame(chart, y, places, width, height)]
    drawn += [_spread(series.spread, series.role, places, y) for series in chart.series if series.spread]
    drawn += [_line(series, places, y) for series in chart.series]
    step = places[1] - places[0] if len(places) > 1 else width - LEFT - RIGHT
    for index, (name, place) in enumerate(zip(chart.x_labels, places, strict=True)):
        area = f'x="{place - step / 2:.1f}" y="{TOP}" width="{step:.1f}" height="{height - TOP - BOTTOM}"'
        drawn.append(f'<rect class="area" {area} data-tip="{_tip(chart, index, name)}"/>')
    return _svg(width, height, chart.title, drawn)


def bar_plot(chart: Chart, height: int = BARS_HEIGHT) -> str:
    """Bars side by side at each place."""
    width = wide(len(chart.x_labels))
    places = _places(len(chart.x_labels), width)
    y = _y_scale(chart, height)
    drawn = [_frame(chart, y, places, width, height)]
    for index, (name, place) in enumerate(zip(chart.x_labels, places, strict=True)):
        present = [(series, value) for series in chart.series if (value := series.values[index]) is not None]
        bar = 0.8 * PLACE / max(2, len(present))
        left = place - bar * len(present) / 2
        for series, value in present:
            top, bottom = sorted((y(0), y(value)))
            box = f'x="{left:.1f}" y="{top:.1f}" width="{bar - 1:.1f}" height="{max(bottom - top, 0.5):.1f}"'
            drawn.append(f'<rect class="{series.role}" {box}/>')
            left += bar
        area = f'x="{place - PLACE / 2:.1f}" y="{TOP}" width="{PLACE}" height="{height - TOP - BOTTOM}"'
        drawn.append(f'<rect class="area" {area} data-tip="{_tip(chart, index, name)}"/>')
    return _svg(width, height, chart.title, drawn)


def low_plot(chart: Chart) -> str:
    """A line as wide as bars of the same places."""
    return line_plot(chart, wide(len(chart.x_labels)), LOW_HEIGHT)


def heat_plot(heat_map: HeatMap) -> str:
    """A cell a value, stronger in colour the further it is from 0."""
    width, height = wide(len(heat_map.x_labels)), TOP + HEAD_HEIGHT * len(heat_map.y_labels) + BOTTOM
    places = _places(len(heat_map.x_labels), width)
    drawn = _x_axis(heat_map.x_labels, places, height)
    drawn.append(_text(13, (height - BOTTOM + TOP) / 2, "head", "label", turned=True))
    for row, (name, values) in enumerate(zip(heat_map.y_labels, heat_map.values, strict=True)):
        top = TOP + row * HEAD_HEIGHT
        drawn.append(_text(LEFT - 6, top + HEAD_HEIGHT - 4, name, "tick", "end"))
        for layer, place, value in zip(heat_map.x_labels, places, values, strict=True):
            if value is not None:
                drawn.append(_heat_cell(place, top, value, heat_map.largest, f"layer {layer}, head {name}"))
    return _svg(width, height, heat_map.title, drawn)


def wide(num_places: int) -> int:
    """Width of a plot with so many places."""
    return LEFT + PLACE * max(num_places, FEWEST_PLACES) + RIGHT


def _heat_cell(place: float, top: float, value: float, largest: float, name: str) -> str:
    sign = "positive" if value >= 0 else "negative"
    box = f'x="{place - PLACE / 2 + 0.5:.1f}" y="{top}" width="{PLACE - 1}" height="{HEAD_HEIGHT - 1}"'
    fill = f'class="cell {sign}" fill-opacity="{abs(value) / largest:.3f}"'
    return f'<rect {fill} {box} data-tip="{escape(f"{name}: {signed(value)}")}"/>'


def _places(count: int, width: int) -> list[float]:
    step = (width - LEFT - RIGHT) / max(count, 1)
    return [LEFT + step * (index + 0.5) for index in range(count)]


def _y_scale(chart: Chart, height: int) -> Scale:
    return Scale.of(chart.all_values, height - BOTTOM, TOP, is_logarithmic=chart.is_logarithmic)


def _frame(chart: Chart, y: Scale, places: Sequence[float], width: int, height: int) -> str:
    drawn = _x_axis(chart.x_labels, places, height)
    for tick in y.ticks:
        kind = "zero" if tick == 0 else "grid"
        drawn.append(f'<line class="{kind}" x1="{LEFT}" x2="{width - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        drawn.append(_text(LEFT - 6, y(tick) + 4, tick_text(tick), "tick", "end"))
    drawn.append(_text(13, (height - BOTTOM + TOP) / 2, chart.y_label, "label", turned=True))
    return "".join(drawn)


def _x_axis(labels: Sequence[str], places: Sequence[float], height: int) -> list[str]:
    """Labels of as many places as there is room for: the embedding's, and layers of round numbers."""
    step = places[1] - places[0] if len(places) > 1 else 100.0
    every = next(size for size in (1, 2, 5, 10, 20, 50, 100, 1000) if size * step >= 20)
    drawn = []
    for label, place in zip(labels, places, strict=True):
        if not label.isdigit() or (int(label) % every == 0 and (place - places[0] > 30 or labels[0].isdigit())):
            drawn.append(_text(place, height - BOTTOM + 14, label, "tick"))
    return [*drawn, _text((places[0] + places[-1]) / 2, height - 3, "layer", "label")]


def _line(series: Series, places: Sequence[float], y: Scale) -> str:
    css = f"{series.role} first" if series.of_first else series.role
    points = [(place, y(value)) for place, value in zip(places, series.values, strict=True) if value is not None]
    path = " ".join(f"{x:.1f},{height:.1f}" for x, height in points)
    dots = "".join(f'<circle class="{css}" cx="{x:.1f}" cy="{height:.1f}" r="2"/>' for x, height in points)
    return f'<polyline class="line {css}" points="{path}"/>{dots}'


def _spread(spread: tuple[Values, Values], role: str, places: Sequence[float], y: Scale) -> str:
    low, high = ([(x, y(value)) for x, value in zip(places, values, strict=True) if value is not None]
                 for values in spread)  # fmt: skip
    points = " ".join(f"{x:.1f},{height:.1f}" for x, height in [*low, *reversed(high)])
    return f'<polygon class="spread {role}" points="{points}"/>'


def _tip(chart: Chart, index: int, name: str) -> str:
    title = f"layer {name}" if name.isdigit() else "embedding"
    lines = [
        f"{series.label}\t{described(value, chart)}"
        for series in chart.series
        if (value := series.values[index]) is not None
    ]
    return escape("\n".join([title, *lines]))


def _text(x: float, y: float, content: str, css: str, anchor: str = "middle", *, turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x} {y})"' if turned else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}"{turn}>{escape(content)}</text>'


def _svg(width: int, height: int, title: str, drawn: Iterable[str]) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg {size} role="img" aria-label="{escape(title)}">{"".join(drawn)}</svg>'
