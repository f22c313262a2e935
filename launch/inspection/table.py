"""The table on the terminal: a row a layer, and what the target's logit is made of."""

from __future__ import annotations

from collections.abc import Sequence

from launch.inspection.findings import Attribution, Findings, mean_of_others, signed, state_names
from launch.inspection.token_text import TokenTexts

LARGEST = 5
"""Sublayers and heads that are named."""
SMALLEST = 0.005
"""What two decimals show."""
HEADER = """\
              stream     attention           MLP  cosine to stream     lens at the last token
layer   first others  first others  first others   attention    MLP     prob  token
"""


def table(findings: Findings, texts: TokenTexts) -> str:
    """Lines for stdout, each ended. Norms of the first position, and means over the others."""
    names = state_names(len(findings.layers))
    rows = [_row(findings, texts, state, name) for state, name in enumerate(names)]
    return HEADER + "".join(rows) + "\n" + summary(findings, texts)


def summary(findings: Findings, texts: TokenTexts) -> str:
    """Where the target's logit comes from."""
    target = texts.label(findings.target_id)
    comes = f"{target} comes next with probability {findings.target_probability:.4f}.\n"
    attribution = findings.attribution
    if attribution is None:
        return f"{comes}{findings.no_attribution}\n"
    logit = logit_name(findings, texts)
    return (
        f"{comes}{logit} is {signed(attribution.logit)}, the final norm's scale held: "
        + ", ".join(f"{name} {signed(value)}" for name, value in sums(attribution))
        + f".\nlargest: {_largest(sublayers(attribution))}\nheads: {_largest(heads(attribution))}\n"
    )


def logit_name(findings: Findings, texts: TokenTexts) -> str:
    """What is attributed."""
    target = texts.label(findings.target_id)
    if findings.against_id is None:
        return f"the logit of {target}"
    return f"the logit of {target} minus that of {texts.label(findings.against_id)}"


def sums(attribution: Attribution) -> list[tuple[str, float]]:
    """Contributions by kind; together the logit."""
    kinds = [
        ("embedding", attribution.embedding),
        ("attention", sum(attribution.attention)),
        ("MLPs", sum(attribution.mlp)),
    ]
    rest = [("final bias", attribution.final_bias), ("rounding", attribution.rounding)]
    return kinds + [(name, value) for name, value in rest if abs(value) >= SMALLEST]


def sublayers(attribution: Attribution) -> list[tuple[str, float]]:
    """Every attention and MLP by name."""
    named = [("attention", attribution.attention), ("MLP", attribution.mlp)]
    return [(f"{name} {layer}", value) for name, values in named for layer, value in enumerate(values)]


def heads(attribution: Attribution) -> list[tuple[str, float]]:
    """Every head by name, layer.head."""
    return [
        (f"{layer}.{head}", value)
        for layer, values in enumerate(attribution.heads)
        for head, value in enumerate(values)
    ]


def largest(named: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """Those that contribute most, for or against."""
    return sorted(named, key=lambda item: -abs(item[1]))[:LARGEST]


def _largest(named: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {signed(value)}" for name, value in largest(named))


def cells(findings: Findings, texts: TokenTexts, state: int) -> list[str]:
    """A row's texts: three norms, each of the first position and of the others, two cosines, probability, token."""
    cell = findings.lens[state][-1]
    lens = [f"{cell.probabilities[0]:.4f}", texts.label(cell.token_ids[0])]
    if state == 0:
        return [*_first_and_others(findings.embed_norms), *["-"] * 6, *lens]
    layer = findings.layers[state - 1]
    norms = [_first_and_others(of) for of in (layer.stream_norms, layer.attention_norms, layer.mlp_norms)]
    cosines = [_cosine(mean_of_others(of)) for of in (layer.attention_cosines, layer.mlp_cosines)]
    return [*norms[0], *norms[1], *norms[2], *cosines, *lens]


def _row(findings: Findings, texts: TokenTexts, state: int, name: str) -> str:
    *norms, attention, mlp, probability, token = cells(findings, texts, state)
    columns = "".join(f" {first:>6} {others:>6}" for first, others in zip(norms[::2], norms[1::2], strict=True))
    return f"{name:>5} {columns}   {attention:>9} {mlp:>6}   {probability}  {token}\n"


def _first_and_others(values: tuple[float, ...]) -> tuple[str, str]:
    return _norm(values[0]), _norm(mean_of_others(values))


def _norm(value: float | None) -> str:
    """Four figures, in six characters up to a million."""
    if value is None:
        return "-"
    if 1000 <= value < 1e6:
        return f"{value:.0f}"
    return f"{value:.4g}" if 0.1 <= value < 1000 or value == 0 else f"{value:.0e}"


def _cosine(value: float | None) -> str:
    return "-" if value is None else f"{value:+.3f}".replace("-", "−")
