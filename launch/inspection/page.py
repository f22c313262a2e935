"""The report: one HTML file with everything in it, that fetches nothing."""

from __future__ import annotations

from html import escape

from launch.inspection import charts, svg, table
from launch.inspection.charts import Chart
from launch.inspection.findings import Attribution, Findings, signed, state_names
from launch.inspection.lens_grid import lens_grid
from launch.inspection.script import SCRIPT
from launch.inspection.style import STYLE
from launch.inspection.token_text import TokenTexts

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""Content security policy: the browser refuses whatever is not in the file."""
LAYER = "x<sub>l+1</sub> = x<sub>l</sub> + a<sub>l</sub> + m<sub>l</sub>"


def page(findings: Findings, texts: TokenTexts) -> str:
    """The whole document. Everything that comes from the model, its tokens above all, is escaped."""
    title = escape(f"Inside {_model_name(findings)}")
    sections = [_stream(findings), _logit(findings, texts), _lens(findings, texts), _numbers(findings, texts)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<header><h1>{title}</h1>\n{_top(findings, texts)}</header>\n<main>\n{''.join(sections)}</main>\n"
        f'<div id="tip" role="status" hidden></div>\n<script>{SCRIPT}</script>\n</body>\n</html>\n'
    )


def _model_name(findings: Findings) -> str:
    return findings.run.model.rstrip("/").rsplit("/", 1)[-1]


def _top(findings: Findings, texts: TokenTexts) -> str:
    run = findings.run
    ranks = "1 rank" if run.tp_size == 1 else f"{run.tp_size} ranks"
    numbers = run.dtype if run.weights == "plain" else f"{run.dtype}, {run.weights} weights"
    shown = [findings.token_ids[position] for position in findings.positions]
    tokens = "".join(f"<span>{escape(texts.label(token_id))}</span>" for token_id in shown)
    left_out = len(findings.token_ids) - len(shown)
    note = f", of which the first and the last {len(shown) - 1} are shown" if left_out else ""
    return (
        f"<p>{len(findings.layers)} layers, {escape(numbers)} on {escape(run.device)}, {ranks}. "
        f"The prompt is {len(findings.token_ids)} tokens{note}:</p>\n"
        f'<p class="tokens">{tokens}</p>\n<p>{_chip(findings.target_id, texts)} comes next with probability '
        f"{findings.target_probability:.4f}.</p>"
    )


def _stream(findings: Findings) -> str:
    if findings.run.norm_placement == "post":
        how = "In this model a norm follows every add, so that the stream keeps its size."
    else:
        how = f"Each layer adds what its attention (a) and its MLP (m) write to the stream: {LAYER}."
    caption = (
        f"{how} The plots show the L2 norm of the stream after each layer, the norms of the writes, and the cosine of "
        "each write to the state it is added to: above 0 it lengthens what is there, below 0 it takes some away. The "
        "first position stands apart: in many models attention rests on it, and its norm is far larger."
    )
    keys = _key("", "other positions: mean, and their range") if len(findings.positions) > 1 else ""
    legend = f'<p class="legend">{keys}{_key("first", "first position")}</p>'
    figures = "".join(_figure(chart, svg.line_plot(chart)) for chart in charts.norm_charts(findings))
    return _section("The residual stream", caption, f'{legend}<div class="panels">{figures}</div>')


def _logit(findings: Findings, texts: TokenTexts) -> str:
    attribution = findings.attribution
    if attribution is None:
        return _section("What makes the logit", escape(findings.no_attribution), "")
    what, hint = f"the logit of {_chip(findings.target_id, texts)}", ""
    if findings.against_id is None:
        hint = " One logit alone has no zero point: --against names a second token to compare it with."
    else:
        what += f" minus that of {_chip(findings.against_id, texts)}"
    caption = (
        "The last state is a sum of writes, and a logit is linear in it once the scale of the final norm is frozen at "
        f"its value in this run. So {what} at the last token, <b>{signed(attribution.logit)}</b>, splits into what "
        f"each write adds by itself. Not counted: what a write changes in the later layers that read it.{hint}"
    )
    return _section(
        "What makes the logit", caption, f'<div class="split">{_plots(attribution)}{_sums(attribution)}</div>'
    )


def _plots(attribution: Attribution) -> str:
    bars, total = charts.contribution_chart(attribution), charts.sum_chart(attribution)
    heads = charts.head_map(attribution)
    most = f"{heads.largest:.2f}"
    legend = f'<span class="scale"><span>−{most}</span><i class="ramp"></i><span>+{most}</span></span>'
    return (
        f'<div class="scroll">{_figure(bars, svg.bar_plot(bars))}{_figure(total, svg.low_plot(total))}'
        f"<figure><figcaption>{heads.title}{legend}</figcaption>{svg.heat_plot(heads)}</figure></div>"
    )


def _sums(attribution: Attribution) -> str:
    lists = [
        ("In all", [*table.sums(attribution), ("logit", attribution.logit)]),
        ("Largest sublayers", table.largest(table.sublayers(attribution))),
        ("Largest heads (layer.head)", table.largest(table.heads(attribution))),
    ]
    return '<div class="sums">' + "".join(_list(title, items) for title, items in lists) + "</div>"


def _list(title: str, items: list[tuple[str, float]]) -> str:
    rows = "".join(f"<tr><th>{name}</th><td>{signed(value)}</td></tr>" for name, value in items)
    return f"<table><caption>{title}</caption>{rows}</table>"


def _lens(findings: Findings, texts: TokenTexts) -> str:
    caption = (
        "What the model would say if it stopped there: the final norm and the LM head on the stream after each layer. "
        "A column is a token of the prompt, a cell the likeliest token to follow it, framed where that is already the "
        "final answer. Hover, tap, or move with the arrow keys to see the five likeliest, the entropy, and "
        "KL(final ‖ lens), which is 0 where the lens predicts what the model does."
    )
    choices = "".join(
        f'<input type="radio" name="shade" id="by-{key}"{" checked" if key == "p" else ""}>'
        f'<label for="by-{key}">{name}</label>'
        for key, name in (("p", "higher probability"), ("e", "higher entropy"), ("k", "higher KL"))
    )
    grid = f'<div class="scroll">{lens_grid(findings, texts)}</div>'
    chart = charts.target_chart(findings, escape(texts.label(findings.target_id)))
    target = f'<div class="scroll">{_figure(chart, svg.low_plot(chart))}</div>'
    return _section("The lens", caption, f'<div class="shades">stronger colour:{choices}{grid}</div>{target}')


def _numbers(findings: Findings, texts: TokenTexts) -> str:
    """The values behind the plots, for those who cannot see or hover."""
    head = ["layer", "‖x‖ first", "others", "‖a‖ first", "others", "‖m‖ first", "others", "cos a", "cos m", "p", "lens"]
    if findings.attribution is not None:
        head += ["attention", "MLP"]
    rows = ["".join(f"<th>{name}</th>" for name in head)]
    names = state_names(len(findings.layers))
    for state, name in enumerate(names):
        rows.append(f"<th>{name}</th>" + "".join(f"<td>{text}</td>" for text in _row(findings, texts, state)))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        "<section><details><summary>All layers as numbers</summary><p>Norms: the first position, and the mean of the "
        "others; cosines: the mean of the others; the lens at the last token; contributions to the logit.</p>"
        f'<div class="scroll"><table class="numbers">{body}</table></div></details></section>\n'
    )


def _row(findings: Findings, texts: TokenTexts, state: int) -> list[str]:
    row = [escape(text) for text in table.cells(findings, texts, state)]
    attribution = findings.attribution
    if attribution is None:
        return row
    if state == 0:
        return [*row, signed(attribution.embedding), ""]
    return [*row, signed(attribution.attention[state - 1]), signed(attribution.mlp[state - 1])]


def _figure(chart: Chart, plot: str) -> str:
    names = {series.role: series.name for series in chart.series}
    keys = "".join(_key(role, name) for role, name in names.items())
    return f'<figure><figcaption>{chart.title}<span class="legend">{keys}</span></figcaption>{plot}</figure>'


def _key(css: str, name: str) -> str:
    return f'<span class="key"><i class="{css}"></i>{name}</span>'


def _chip(token_id: int, texts: TokenTexts) -> str:
    return f'<span class="token">{escape(texts.label(token_id))}</span>'


def _section(title: str, caption: str, content: str) -> str:
    return f"<section><h2>{title}</h2><p>{caption}</p>{content}</section>\n"
