"""What the plots show, as data that both the HTML report and the PNG files draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launch.inspection.findings import Attribution, Findings, LayerFindings, mean_of_others, signed, state_names

Values = tuple[float | None, ...]
"""One value a place on the x axis; None where there is none."""


@dataclass(frozen=True)
class Series:
    """One line, or one bar a place.

    Attributes:
        name: of what it shows.
        role: what it is, which decides its colour: "stream", "embedding", "attention" or "mlp".
        of_first: of the first position, which is drawn in another way.
        spread: the lowest and highest value at each place, where the line is a mean.
    """

    name: str
    role: str
    values: Values
    of_first: bool = False
    spread: tuple[Values, Values] | None = None

    @property
    def label(self) -> str:
        """The name, with the positions that it is of."""
        return self.name + (", first position" if self.of_first else ", other positions" if self.spread else "")


@dataclass(frozen=True)
class Chart:
    """Lines or bars over the states of the stream."""

    title: str
    y_label: str
    x_labels: tuple[str, ...]
    series: tuple[Series, ...]
    is_logarithmic: bool = False

    @property
    def all_values(self) -> list[float]:
        """Every value that is drawn."""
        drawn = [values for one in self.series for values in (one.values, *(one.spread or ()))]
        return [value for values in drawn for value in values if value is not None]


@dataclass(frozen=True)
class HeatMap:
    """Signed values [rows][columns]; the colour's scale is symmetric about 0."""

    title: str
    x_labels: tuple[str, ...]
    y_labels: tuple[str, ...]
    values: tuple[Values, ...]

    @property
    def largest(self) -> float:
        """The value of full colour."""
        return max((abs(value) for row in self.values for value in row if value is not None), default=0.0) or 1.0


def norm_charts(findings: Findings) -> tuple[Chart, Chart, Chart]:
    """Norms of the stream, norms of the writes, and their cosines to the stream."""
    layers, names = findings.layers, tuple(state_names(len(findings.layers)))
    of_stream = [findings.embed_norms, *(layer.stream_norms for layer in layers)]
    stream = Chart("Norm of the stream", "‖x‖", names, _both("stream", "stream", of_stream), is_logarithmic=True)
    writes = _writes(layers, lambda layer: (layer.attention_norms, layer.mlp_norms))
    cosines = _writes(layers, lambda layer: (layer.attention_cosines, layer.mlp_cosines))
    return (
        stream,
        Chart("Norm of each write", "‖a‖, ‖m‖", names[1:], writes, is_logarithmic=True),
        Chart("Cosine of each write to the stream", "cos", names[1:], cosines),
    )


def contribution_chart(attribution: Attribution) -> Chart:
    """A bar for the embedding, then two a layer."""
    names = tuple(state_names(len(attribution.mlp)))
    nothing: Values = (None,) * len(attribution.mlp)
    series = (
        Series("embedding", "embedding", (attribution.embedding, *nothing)),
        Series("attention", "attention", (None, *attribution.attention)),
        Series("MLP", "mlp", (None, *attribution.mlp)),
    )
    return Chart("Contribution of each sublayer", "logit", names, series)


def sum_chart(attribution: Attribution) -> Chart:
    """The logit as it adds up, from the embedding (with what belongs to no sublayer) to the last layer."""
    total = attribution.embedding + attribution.final_bias + attribution.rounding
    sums: list[float | None] = [total]
    for attention, mlp in zip(attribution.attention, attribution.mlp, strict=True):
        total += attention + mlp
        sums.append(total)
    names = tuple(state_names(len(attribution.mlp)))
    return Chart("Sum so far", "logit", names, (Series("the logit as layers add to it", "stream", tuple(sums)),))


def target_chart(findings: Findings, label: str) -> Chart:
    """The target's probability in the lens after each layer."""
    names = tuple(state_names(len(findings.layers)))
    series = Series(label, "stream", findings.target_by_state)
    return Chart("Probability of the target in the lens at the last token", "p", names, (series,), is_logarithmic=True)


def head_map(attribution: Attribution) -> HeatMap:
    """A row a head and a column a layer, under the bars of the same layers; a last row for biases, if there are any."""
    by_head = list(zip(*attribution.heads, strict=True))
    rows = [(None, *values) for values in by_head]
    labels = [str(head) for head in range(len(by_head))]
    if any(attribution.attention_bias):
        rows.append((None, *attribution.attention_bias))
        labels.append("bias")
    names = tuple(state_names(len(attribution.heads)))
    return HeatMap("Contribution of each head", names, tuple(labels), tuple(rows))


def described(value: float, chart: Chart) -> str:
    """A value of the chart in words."""
    return f"{value:.4g}".replace("-", "−") if chart.y_label != "logit" else signed(value)


def _both(role: str, name: str, by_place: list[tuple[float, ...]]) -> tuple[Series, ...]:
    """The mean over all positions but the first with its spread, and the first."""
    first = Series(name, role, tuple(values[0] for values in by_place), of_first=True)
    if len(by_place[0]) == 1:
        return (first,)
    spread = tuple(min(values[1:]) for values in by_place), tuple(max(values[1:]) for values in by_place)
    means = tuple(mean_of_others(values) for values in by_place)
    return Series(name, role, means, spread=spread), first


def _writes(
    layers: tuple[LayerFindings, ...],
    pair: Callable[[LayerFindings], tuple[tuple[float, ...], tuple[float, ...]]],
) -> tuple[Series, ...]:
    pairs = [pair(layer) for layer in layers]
    attention, mlp = [values for values, _ in pairs], [values for _, values in pairs]
    return (*_both("attention", "attention", attention), *_both("mlp", "MLP", mlp))
