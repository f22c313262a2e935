"""The results as tables, on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from launch.measurement.command_line import TABLE_WIDTH

if TYPE_CHECKING:
    from rich.table import Table


def print_results(results: Mapping[str, Any]) -> None:
    """A table, or some lines, for each part that was run; `results` as in the JSON."""
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else TABLE_WIDTH)
    console.print(f"{results['network']}: {results['about']}", markup=False)
    if found := results.get("agreement"):
        console.print(_agreement(found), markup=False)
    if found := results.get("delays"):
        console.print(_links("median times over links with delay", found))
        console.print(_growths("what a delay of 1 ms each way adds", found["growths"]))
    if found := results.get("window"):
        console.print(_growths(f"the same with an initial window of {found['segments']} segments", found["growths"]))
    if found := results.get("loss"):
        console.print(_links("median (longest) times over links that lose packets", found, longest=True))
    if found := results.get("ends"):
        console.print(_ends(found))


def _agreement(found: Mapping[str, Any]) -> str:
    same = "the same as" if found["same_ids"] else "NOT those of"
    bits = "the same bits as" if found["bitwise"] else "other bits than"
    return (
        f"{len(found['new_ids'])} greedy tokens: {same} one machine at t = 4 and t = 1\n"
        f"training steps, float64: {bits} one machine at t = 4; "
        f"at most {found['largest_difference']:.1e} from t = 1, relative"
    )


def _links(title: str, found: Mapping[str, Any], longest: bool = False) -> Table:
    from rich.table import Table

    collectives, decode = found["collectives"], found["decode"]
    table = Table(title=title, title_justify="left")
    table.add_column("ms")
    for link in collectives:
        table.add_column(f"{1e3 * link['delay_s']:g} ms, {100 * link['loss']:g} %", justify="right")
    rows = {name: [link["seconds"][name] for link in collectives] for name in collectives[0]["seconds"]}
    for name, spreads in {**rows, "decode step": [link["seconds"] for link in decode]}.items():
        table.add_row(name, *(_milliseconds(spread, longest) for spread in spreads))
    shares = [f"{100 * link['communication_share']:.0f} %" for link in decode]
    table.add_row("of generation in collectives", *shares)
    return table


def _milliseconds(spread: Mapping[str, float], longest: bool) -> str:
    return f"{1e3 * spread['median']:.2f}" + (f" ({1e3 * spread['maximum']:.0f})" if longest else "")


def _growths(title: str, found: Iterable[Mapping[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in ("steps", "planner, ms", "measured, ms"):
        table.add_column(heading, justify="right")
    for each in found:
        table.add_row(each["name"], f"{each['steps']:g}", f"{each['predicted']:.2f}", f"{each['measured']:.2f}")
    return table


def _ends(found: Iterable[Mapping[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(title="until every process of both nodes is gone", title_justify="left")
    for heading in ("", "seconds", "statuses", "last lines"):
        table.add_column(heading)
    for each in found:
        statuses = ", ".join(map(str, each["statuses"]))
        table.add_row(each["what"], f"{each['seconds']:.1f}", statuses, "\n".join(filter(None, each["last_lines"])))
    return table
