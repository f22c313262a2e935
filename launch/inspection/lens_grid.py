"""The logit lens as an HTML table: a row a state of the stream, a column a token of the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from launch.inspection.findings import Findings, LensCell, state_names
from launch.inspection.token_text import TokenTexts


def lens_grid(findings: Findings, texts: TokenTexts) -> str:
    """The table. A cell shows its likeliest token; --p, --e and --k are its shades by three measures.

    Shades by KL grow with its root: the first states are so far off that the others would all look alike.
    """
    highest_entropy = max(cell.entropy for state in findings.lens for cell in state) or 1.0
    highest_kl = max(cell.kl for state in findings.lens for cell in state) or 1.0
    final = [cell.token_ids[0] for cell in findings.lens[-1]]
    rows = [_header(findings, texts)]
    for name, state in zip(state_names(len(findings.layers)), findings.lens, strict=True):
        cells = []
        for column, cell in enumerate(state):
            shades = (
                f"--p:{cell.probabilities[0]:.3f};--e:{_share(cell.entropy, highest_entropy):.3f};"
                f"--k:{_share(cell.kl, highest_kl) ** 0.5:.3f}"
            )
            css = ' class="same"' if cell.token_ids[0] == final[column] else ""
            place = _place(findings, column, name, texts)
            label = escape(texts.label(cell.token_ids[0]))
            cells.append(f'<td{css} style="{shades}" data-tip="{escape(_tip(cell, place, texts))}">{label}</td>')
        rows.append(f'<tr><th scope="row">{name}</th>{"".join(cells)}</tr>')
    return f'<table class="lens" tabindex="0" aria-label="Logit lens">{"".join(rows)}</table>'


def _header(findings: Findings, texts: TokenTexts) -> str:
    cells = []
    before = -1
    for position in findings.positions:
        gap = ' class="gap"' if position != before + 1 else ""
        label = escape(texts.label(findings.token_ids[position]))
        cells.append(f'<th scope="col"{gap}><span class="position">{position}</span>{label}</th>')
        before = position
    return f'<tr><th class="corner">layer</th>{"".join(cells)}</tr>'


def _place(findings: Findings, column: int, name: str, texts: TokenTexts) -> str:
    position = findings.positions[column]
    after = "the embedding" if name == "embed" else f"layer {name}"
    return f"after {after}, at token {position} {texts.label(findings.token_ids[position])}"


def _tip(cell: LensCell, place: str, texts: TokenTexts) -> str:
    return "\n".join([place, *_lines(cell, texts)])


def _lines(cell: LensCell, texts: TokenTexts) -> Iterator[str]:
    for token_id, probability in zip(cell.token_ids, cell.probabilities, strict=True):
        yield f"{texts.label(token_id)}\t{100 * probability:.2f} %"
    yield f"entropy\t{cell.entropy:.3f} nats"
    yield f"KL to the final prediction\t{cell.kl:.3f} nats"


def _share(value: float, highest: float) -> float:
    return max(0.0, min(1.0, value / highest))
