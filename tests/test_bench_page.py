"""docs/scaling.md shows what benchmarks/results/scaling-*.jsonl hold: its pictures, and every row of its tables."""

from __future__ import annotations

import json

from docs.images.draw_scaling import IMAGES, RESULTS, ROOT, pictures
from launch.benching.plots import data_of, draw
from launch.benching.results_file import read_results
from launch.benching.table import about_text, tables

PAGE = ROOT / "docs" / "scaling.md"


def test_the_pictures_are_drawn_from_the_committed_rows():
    """By the numbers that they hold, which do not depend on who draws them."""
    expected = pictures()
    assert expected and {path.name for path in IMAGES.glob("scaling-*.png")} == set(expected)
    for name, chart in expected.items():
        numbers = json.loads(json.dumps(chart.to_json()))
        assert data_of((IMAGES / name).read_bytes()) == numbers, name
        assert f"images/{name}" in PAGE.read_text(encoding="utf-8")
    name, chart = next(iter(expected.items()))
    assert data_of(draw(chart)) == data_of((IMAGES / name).read_bytes())


def test_the_tables_of_the_page_are_those_of_the_rows():
    page = PAGE.read_text(encoding="utf-8")
    for results in sorted(RESULTS.glob("scaling-*.jsonl")):
        settings, rows = read_results(results)
        assert about_text(settings) in page.replace("\n", " ")
        for table in tables(rows):
            assert table.title in page
            for cells in table.rows:
                assert f"| {' | '.join(cells)} |" in page
