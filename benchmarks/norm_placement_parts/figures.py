"""The figures of docs/norm-placement.md, drawn from the numbers alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.norm_placement_parts.at_initialisation import DEPTHS, PLACEMENTS
from benchmarks.norm_placement_parts.intervals import Estimate
from benchmarks.norm_placement_parts.summary import (
    Measured,
    all_layers,
    by_layer,
    held_out,
    last_layers,
    post_sums,
    pre_states,
)
from benchmarks.norm_placement_parts.training import LOSSES_EVERY, SEEDS_BY_LEARNING_RATE, STEPS, Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"post": "#c24e00", "pre": "#0969da"}
REFERENCE = {"color": "#59636e", "linestyle": "--", "linewidth": 1.2}
NAMES = {"post": "post-norm", "pre": "pre-norm"}


def draw(measured: Measured, directory: Path) -> None:
    """Writes norm-placement-*.png of the parts that were run. Needs matplotlib."""
    figures = {}
    if "initialisation" in measured:
        figures["states"] = _states(measured["initialisation"])
        figures["gradients"] = _gradients(measured["initialisation"])
    if "training" in measured:
        figures["training"] = _training(measured["training"])
    if "checkpoints" in measured:
        figures["checkpoints"] = _checkpoints(measured["checkpoints"])
    for name, figure in figures.items():
        figure.savefig(directory / f"norm-placement-{name}.png", dpi=110)


def _panels() -> tuple[Figure, Axes, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure, left, right


def _with_intervals(axes: Axes, x: Any, estimates: list[Estimate], label: str, colour: str, **style: Any) -> None:
    values, lows, highs = np.array(estimates).T
    axes.fill_between(x, lows, highs, color=colour, alpha=0.2, linewidth=0)
    axes.plot(x, values, label=label, color=colour, marker="o", markersize=3.5, **style)


def _states(initialisation: dict[str, Any]) -> Figure:
    figure, left, right = _panels()
    sums = by_layer(post_sums(initialisation))
    layers = np.arange(1, len(sums) + 1)
    _with_intervals(left, layers, sums, "measured", COLOURS["post"])
    left.axhline(1.5, label="3/2", **REFERENCE)
    left.set_ylim(1.2, 1.8)
    left.set(title="post-norm: the sum that enters the second norm", xlabel="layer", ylabel="E ‖·‖² / d")
    for tokens, label, colour in (
        ("first", "first token", "#8250df"),
        ("mean", "mean of all tokens", COLOURS["pre"]),
        ("last", "last token", "#1a7f37"),
    ):
        _with_intervals(right, layers, by_layer(pre_states(initialisation, tokens)), label, colour)
    right.plot(layers, 1 + 1.5 * layers, label="1 + 3l/2 and 1 + l/2", **REFERENCE)
    right.plot(layers, 1 + 0.5 * layers, **REFERENCE)
    right.set(title="pre-norm: the stream after layer l", xlabel="layer l", ylabel="E ‖x‖² / d")
    left.legend()
    right.legend()
    return figure


def _gradients(initialisation: dict[str, Any]) -> Figure:
    figure, left, right = _panels()
    for placement in PLACEMENTS:
        last = by_layer(last_layers(initialisation, placement, "gradient"))
        _with_intervals(left, DEPTHS, last, NAMES[placement], COLOURS[placement])
        deepest = by_layer(all_layers(initialisation, placement, "gradient"))
        _with_intervals(right, np.arange(1, len(deepest) + 1), deepest, NAMES[placement], COLOURS[placement])
    first = by_layer(last_layers(initialisation, "pre", "gradient"))[0].value
    left.plot(DEPTHS, first * (np.array(DEPTHS) / DEPTHS[0]) ** -0.5, label="∝ L^(−1/2)", **REFERENCE)
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xticks(DEPTHS, map(str, DEPTHS))
    left.minorticks_off()
    left.set_yticks([0.1, 0.2, 0.4], ["0.1", "0.2", "0.4"])
    left.set(title="the last layer's", xlabel="layers L", ylabel="‖∂loss/∂W²‖")
    right.set_ylim(bottom=0)
    right.set(title=f"every layer's, of {DEPTHS[-1]}", xlabel="layer", ylabel="‖∂loss/∂W²‖")
    left.legend()
    right.legend()
    return figure


def _training(training: dict[str, Any]) -> Figure:
    figure, left, right = _panels()
    rate = next(iter(SEEDS_BY_LEARNING_RATE))
    steps = np.arange(LOSSES_EVERY, STEPS + 1, LOSSES_EVERY)
    choices = [(placement, warmup) for placement in PLACEMENTS for warmup in (True, False)]
    for placement, warmup in choices:
        names = [Trial(placement, warmup, rate, seed).name for seed in range(SEEDS_BY_LEARNING_RATE[rate])]
        curves = by_layer(np.array([training[name]["losses"] for name in names]))
        label = f"{NAMES[placement]}, {'' if warmup else 'no '}warm-up"
        values, lows, highs = np.array(curves).T
        left.fill_between(steps, lows, highs, color=COLOURS[placement], alpha=0.15, linewidth=0)
        left.plot(steps, values, label=label, color=COLOURS[placement], linestyle="-" if warmup else ":")
    left.set(title=f"training, learning rate {rate:g}", xlabel="step", ylabel="loss (nats a token)")
    left.legend()
    places = []
    for learning_rate in SEEDS_BY_LEARNING_RATE:
        for placement, warmup in choices:
            losses = held_out(training, placement, warmup, learning_rate)
            marker = "o" if warmup else "x"
            right.plot([len(places)] * len(losses), losses, marker, color=COLOURS[placement])
            places.append(f"{placement}\n{'' if warmup else 'no '}warm-up\n{learning_rate:g}")
    right.set_xticks(range(len(places)), places, fontsize=8)
    right.set(title="held-out loss after the last step, every seed", ylabel="nats a token")
    return figure


def _checkpoints(checkpoints: dict[str, Any]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(checkpoints), 4.2), layout="constrained")
    for axes, (name, facts) in zip(np.ravel(figure.subplots(1, len(checkpoints))), checkpoints.items(), strict=True):
        layers = range(len(facts["layers"]))
        first, mean, low, high = (
            [layer[fact] for layer in facts["layers"]] for fact in ("first", "mean", "low", "high")
        )
        axes.plot(layers, first, label="first token", color="#8250df", marker="o", markersize=3.5)
        axes.fill_between(layers, low, high, color=COLOURS["pre"], alpha=0.2, linewidth=0)
        axes.plot(
            layers, mean, label="other tokens: mean, 5 % to 95 %", color=COLOURS["pre"], marker="o", markersize=3.5
        )
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.set(title=name, xlabel="layers behind", ylabel="‖x‖")
        axes.legend()
    return figure
