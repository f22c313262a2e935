"""The report's style sheet: one set of colours for light, one for dark; the reader's system chooses."""

STYLE = """
:root {
  --ground: #ffffff; --raised: #f6f8fa; --ink: #1f2328; --faint: #59636e; --rule: #d1d9e0; --mark: #1f2328;
  --stream: #1a7f37; --embedding: #6e7781; --attention: #0969da; --mlp: #c24e00;
  --positive: #1b7837; --negative: #7b3294; --heat: 64, 160, 255;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #0d1117; --raised: #161b22; --ink: #e6edf3; --faint: #9ea7b3; --rule: #30363d; --mark: #e6edf3;
    --stream: #3fb950; --embedding: #9ea7b3; --attention: #58a6ff; --mlp: #f0883e;
    --positive: #5fd37a; --negative: #d2a8ff; --heat: 31, 111, 235;
  }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem clamp(0.75rem, 3vw, 2.5rem) 4rem; max-width: 1280px; color: var(--ink);
  background: var(--ground); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
h1 { font-size: 1.6rem; margin: 0 0 0.25rem; overflow-wrap: anywhere }
h2 { font-size: 1.2rem; margin: 2.25rem 0 0.25rem; padding-top: 1rem; border-top: 1px solid var(--rule) }
p { margin: 0.25rem 0 0.75rem; max-width: 76ch }
figure { margin: 0 }
figcaption { font-weight: 600; margin: 0.75rem 0 0.25rem; font-size: 0.92rem; position: sticky; left: 0;
  width: fit-content }
.tokens span, .token, .lens { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace }
.tokens { max-width: none; display: flex; flex-wrap: wrap; gap: 3px; max-height: 9rem; overflow: auto }
.tokens span, .token { background: var(--raised); border: 1px solid var(--rule); border-radius: 4px; padding: 0 4px;
  font-size: 0.88em; white-space: pre; unicode-bidi: isolate }
.panels { display: flex; flex-wrap: wrap; gap: 0.5rem 1.5rem; align-items: flex-end }
.panels figure, .scroll { max-width: 100%; overflow-x: auto }
.scroll figure { width: max-content }
.legend { display: flex; flex-wrap: wrap; gap: 0 1rem; font-weight: 400; font-size: 0.85rem; color: var(--faint) }
.key i { --line: var(--own, var(--faint)); display: inline-block; width: 18px; height: 4px; margin: 0 6px 3px 0;
  border-radius: 2px; background: var(--line) }
.key i.first { background: repeating-linear-gradient(90deg, var(--line) 0 4px, transparent 4px 7px) }
.stream { --own: var(--stream) } .embedding { --own: var(--embedding) }
.attention { --own: var(--attention) } .mlp { --own: var(--mlp) }
svg { display: block }
svg text { font-size: 11px; fill: var(--faint) }
svg .label { font-size: 12px }
svg .grid { stroke: var(--rule); stroke-width: 1 } svg .zero { stroke: var(--faint); stroke-width: 1 }
svg rect, svg circle { fill: var(--own) }
svg .line { fill: none; stroke: var(--own); stroke-width: 1.75 }
svg .line.first { stroke-dasharray: 4 3 }
svg .spread { fill: var(--own); opacity: 0.16 }
svg .area { fill: var(--ink); fill-opacity: 0 } svg .area:hover { fill-opacity: 0.07 }
svg .positive { fill: var(--positive) } svg .negative { fill: var(--negative) }
svg .cell { stroke: var(--rule); stroke-width: 0.5 } svg .cell:hover { stroke: var(--mark); stroke-width: 1.5 }
.scale { display: inline-flex; align-items: center; gap: 6px; margin-left: 1rem; font-weight: 400; font-size: 0.85rem;
  color: var(--faint) }
.ramp { width: 110px; height: 10px; background: linear-gradient(90deg, var(--negative), transparent, var(--positive)) }
.split { display: flex; flex-wrap: wrap; gap: 0 3rem }
.sums { display: flex; flex-wrap: wrap; gap: 0 2.5rem; flex: 1 1 220px; align-content: flex-start }
.sums table { font-size: 13px; margin: 0.75rem 0 0; align-self: flex-start; min-width: 200px }
.sums caption { font-weight: 600; text-align: left; font-size: 0.92rem; padding-bottom: 2px }
.sums th { font-weight: 400; text-align: left; color: var(--faint) }
.sums td { text-align: right; font-variant-numeric: tabular-nums }
.sums th, .sums td { border-top: 1px solid var(--rule); padding: 2px 4px }
.shades input { margin: 0 4px 0 12px; vertical-align: -1px }
.shades .scroll { margin-top: 0.5rem; max-height: 94vh; overflow: auto }
table { border-collapse: separate; border-spacing: 1px; font-size: 12px }
.lens th, .lens td { height: 23px; padding: 0 5px; white-space: pre; min-width: 58px; max-width: 108px;
  overflow: hidden; text-overflow: ellipsis; text-align: left; unicode-bidi: isolate }
.lens th { font-weight: 500; background: var(--raised) }
.lens th[scope="col"], .lens .corner { position: sticky; top: 0; z-index: 1 }
.lens th[scope="row"], .lens .corner { position: sticky; left: 0; z-index: 1; text-align: right; color: var(--faint) }
.lens .corner { z-index: 2 }
.lens .position { display: block; font-size: 10px; color: var(--faint) }
.lens .gap { border-left: 3px double var(--faint) }
.lens td { cursor: default; background: rgba(var(--heat), var(--shade)) }
.lens td.same { outline: 1.5px solid var(--mark); outline-offset: -2px }
.lens td:hover, .lens td.at { outline: 2.5px solid var(--attention); outline-offset: -2px }
.lens:focus-visible { outline: 2px solid var(--attention) }
.shades td { --shade: var(--p) }
#by-e:checked ~ .scroll td { --shade: var(--e) } #by-k:checked ~ .scroll td { --shade: var(--k) }
.numbers th, .numbers td { padding: 1px 8px; text-align: right; font-variant-numeric: tabular-nums; white-space: pre }
.numbers tr:nth-child(even) { background: var(--raised) }
summary { cursor: pointer; font-weight: 600; margin-top: 2rem }
#tip { position: fixed; z-index: 9; pointer-events: none; max-width: min(340px, calc(100vw - 16px)); padding: 7px 10px;
  color: var(--ink); background: var(--ground); border: 1px solid var(--faint); border-radius: 6px; font-size: 12.5px;
  box-shadow: 0 4px 14px rgb(0 0 0 / 25%) }
#tip b { display: block; margin-bottom: 3px; overflow-wrap: anywhere }
#tip div { display: flex; justify-content: space-between; gap: 18px }
#tip div span { white-space: pre; overflow: hidden; text-overflow: ellipsis; unicode-bidi: isolate;
  font-variant-numeric: tabular-nums }
#tip .share { height: 3px; margin: 0 0 2px; border-radius: 2px; background: rgb(var(--heat)) }
"""
