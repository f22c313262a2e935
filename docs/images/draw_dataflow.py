"""Draws dataflow.svg: one decoder layer on two ranks. The shares are those of SmolLM2-135M.

python docs/images/draw_dataflow.py
"""

from __future__ import annotations

from pathlib import Path

STYLE = """
  .ground { fill: #ffffff } .band { fill: #eef1f4 } text { fill: #1f2328 }
  .note { fill: #59636e; font-size: 15px }
  .code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 15px }
  .stream { stroke: #0969da; stroke-width: 5; fill: none } .add { fill: #ffffff; stroke: #0969da; stroke-width: 2.5 }
  .wire { stroke: #59636e; stroke-width: 1.8; fill: none } .head { fill: #59636e } .streamhead { fill: #0969da }
  .plain { fill: #ffffff; stroke: #818b98; stroke-width: 1.5 }
  .column { fill: #ddf4ff; stroke: #0969da; stroke-width: 1.5 }
  .row { fill: #fff1e5; stroke: #bc4c00; stroke-width: 1.5 }
  .sum { fill: #dafbe1; stroke: #1a7f37; stroke-width: 1.5 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117 } .band { fill: #1b222b } text { fill: #f0f6fc } .note { fill: #9ea7b3 }
    .stream { stroke: #4493f8 } .add { fill: #0d1117; stroke: #4493f8 }
    .wire { stroke: #9ea7b3 } .head { fill: #9ea7b3 } .streamhead { fill: #4493f8 }
    .plain { fill: #0d1117; stroke: #656c76 } .column { fill: #10243f; stroke: #4493f8 }
    .row { fill: #321c0c; stroke: #db6d28 } .sum { fill: #0f2d19; stroke: #3fb950 }
  }
"""
WIDTH, HEIGHT = 1310, 520
STREAM_Y, BOX_Y = (92, 408), (192, 308)  # of rank 0 and rank 1: the ranks mirror each other around the sum
BOX_HEIGHT = 72
CENTRE = (BOX_Y[0] + BOX_Y[1]) // 2


def text(x: float, y: float, content: str, css: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" class="{css}" text-anchor="{anchor}">{content}</text>'


def box(left: int, width: int, rank: int, css: str, name: str, note: str = "") -> str:
    y, middle = BOX_Y[rank], left + width / 2
    rectangle = (
        f'<rect x="{left}" y="{y - BOX_HEIGHT / 2}" width="{width}" height="{BOX_HEIGHT}" rx="6" class="{css}"/>'
    )
    if not note:
        return rectangle + text(middle, y + 6, name)
    return rectangle + text(middle, y - 5, name) + text(middle, y + 19, note, "note")


def wire(*points: tuple[float, float]) -> str:
    path = "M" + " L".join(f"{x},{y}" for x, y in points)
    return f'<path d="{path}" class="wire" marker-end="url(#head)"/>'


def read(left: int, norm: bool = True) -> list[str]:
    """The band of one `stream.read`: the sum over the ranks, the add, and the norm (none at the right edge)."""
    width = 158 if norm else 76
    drawn = [f'<rect x="{left}" y="22" width="{width}" height="446" rx="10" class="band"/>']
    drawn.append(text(left + width / 2, 46, "stream.read" if norm else "read", "code"))
    pill = left + 16
    top, bottom = BOX_Y[0] - BOX_HEIGHT / 2, BOX_Y[1] + BOX_HEIGHT / 2
    drawn.append(f'<rect x="{pill}" y="{top}" width="44" height="{bottom - top}" rx="22" class="sum"/>')
    drawn.append(
        f'<text transform="translate({pill + 28},{CENTRE}) rotate(-90)" text-anchor="middle">all-reduce Σ</text>'
    )
    for rank, (edge, direction) in enumerate(((top, -1), (bottom, 1))):
        y = STREAM_Y[rank]
        drawn.append(wire((pill + 22, edge), (pill + 22, y - 16 * direction)))
        drawn.append(f'<circle cx="{pill + 22}" cy="{y}" r="13" class="add"/>')
        drawn.append(text(pill + 22, y + 7, "+"))
        if norm:
            drawn.append(wire((left + 118, y), (left + 118, BOX_Y[rank] + (BOX_HEIGHT / 2) * direction)))
            drawn.append(box(left + 88, 60, rank, "plain", "norm"))
    return drawn


def sublayer(left: int, title: str, columns: list[tuple[int, str, str, tuple[str, str]]]) -> list[str]:
    """Boxes from one read to the next write: (width, css, name, note of each rank)."""
    drawn, right = [], left
    for width, css, name, notes in columns:
        for rank in range(2):
            drawn.append(wire((right, BOX_Y[rank]), (right + 18, BOX_Y[rank])))
            drawn.append(box(right + 20, width, rank, css, name, notes[rank]))
        right += 20 + width
    for rank in range(2):
        drawn.append(wire((right, BOX_Y[rank]), (left + 416, BOX_Y[rank])))
    drawn.append(text((left + right) / 2 + 10, 46, title))
    drawn.append(text(left + 372, CENTRE - 4, "partial", "note"))
    drawn.append(text(left + 372, CENTRE + 15, "sums", "note"))
    return drawn


def picture() -> list[str]:
    drawn = [f'<rect width="{WIDTH}" height="{HEIGHT}" class="ground"/>']
    attention = [
        (118, "column", "q, k, v", ("q 0–3, kv 0–1", "q 4–8, kv 1–2")),
        (112, "plain", "attention", ("own KV cache", "own KV cache")),
        (76, "row", "o_proj", ("q 0–3", "q 4–8")),
    ]
    mlp = [
        (106, "column", "gate, up", ("0–767", "768–1535")),
        (106, "plain", "silu(g) · u", ("0–767", "768–1535")),
        (94, "row", "down", ("0–767", "768–1535")),
    ]
    bands = read(92) + read(642) + read(1190, norm=False)
    body = sublayer(240, "attention", attention) + sublayer(790, "MLP", mlp)
    streams = []
    for y in STREAM_Y:
        streams.append(f'<path d="M84,{y} H1288" class="stream" marker-end="url(#streamhead)"/>')
    band_rectangles = [shape for shape in bands if 'class="band"' in shape]
    drawn += band_rectangles + streams + [shape for shape in bands if shape not in band_rectangles] + body
    for rank in range(2):
        drawn.append(text(14, STREAM_Y[rank] - 4, f"rank {rank}", anchor="start"))
        drawn.append(text(14, STREAM_Y[rank] + 17, "[N, D]", "note", anchor="start"))
        drawn.append(text(14, BOX_Y[rank] + 5, "pending", "note", anchor="start"))
        drawn.append(wire((76, BOX_Y[rank]), (106, BOX_Y[rank])))
        for x, label in ((440, "residual stream: x"), (990, "h = x + attention")):
            drawn.append(text(x, STREAM_Y[rank] + (-14 if rank == 0 else 28), label, "note"))
    for left, css, label in (
        (92, "column", "column-parallel: the whole input, this rank's output features"),
        (626, "row", "row-parallel: this rank's input features, an addend of the whole output"),
    ):
        drawn.append(f'<rect x="{left}" y="482" width="22" height="22" rx="4" class="{css}"/>')
        drawn.append(text(left + 32, 498, label, "note", anchor="start"))
    return drawn


def main() -> None:
    marker = (
        '<marker id="{0}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="{1}" markerHeight="{1}" orient="auto">'
        '<path d="M0,0 L10,5 L0,10 z" class="{0}"/></marker>'
    )
    content = "\n".join(picture())
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="18">\n'
        f"<title>One decoder layer on two ranks</title>\n<style>{STYLE}</style>\n"
        f"<defs>{marker.format('head', 7)}{marker.format('streamhead', 4)}</defs>\n{content}\n</svg>\n"
    )
    Path(__file__).with_name("dataflow.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
