"""Draws scaling-*.png: the rows of benchmarks/results/scaling-*.jsonl, as `bench --plots` does.

python docs/images/draw_scaling.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from launch.benching.charts import Chart, charts  # noqa: E402
from launch.benching.plots import draw  # noqa: E402
from launch.benching.results_file import read_results  # noqa: E402

IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "results"
SHOWN = ("speed-up", "time")
"""Efficiency on one machine's cores is the speed-up: every degree has as many."""


def pictures() -> dict[str, Chart]:
    """By file name."""
    found = {}
    for results in sorted(RESULTS.glob("scaling-*.jsonl")):
        settings, rows = read_results(results)
        assert settings is not None
        for name, chart in charts(rows, settings["model"]).items():
            if name.endswith(SHOWN):
                found[f"{results.stem}-{name}.png"] = chart
    return found


def main() -> None:
    for name, chart in pictures().items():
        (IMAGES / name).write_bytes(draw(chart))
        print(IMAGES / name)


if __name__ == "__main__":
    main()
