"""`bench`: how prefill, decode and training scale over ranks, beside t = 1 in the same run."""

from __future__ import annotations

import argparse
import datetime
import io
from typing import TYPE_CHECKING, Any

import tp
from launch.benching import options
from launch.output_files import write
from launch.rank_process import is_rank
from launch.terminal import Terminal
from tp.errors import RequestError

if TYPE_CHECKING:
    from launch.benching.recorder import Recorder
    from launch.benching.rows import Row
    from launch.benching.subject import Subject

DESCRIPTION = """\
How prefill, decode and training scale over ranks and layouts. t = 1 takes part in every round, and all degrees have the
same number of threads in all. Speed-up, efficiency, time in collectives, and the share of what the machine can do."""
TABLE_WIDTH = 200
"""Of tables that are written to a file."""


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser("bench", help="how speed scales over ranks", description=DESCRIPTION)
    options.add_options(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Measures and reports. The ranks are processes of their own, and end with this one."""
    if is_rank():
        raise RequestError("bench starts ranks itself, at every degree: run it without torchrun")
    options.check(arguments)
    arguments.device = _device(arguments.device)
    terminal = Terminal.of_process()
    try:
        _run(arguments, terminal)
    except KeyboardInterrupt:
        if arguments.json is not None:
            terminal.console.print(f"interrupted: --resume goes on with {arguments.json}", soft_wrap=True, markup=False)
        raise
    return 0


def _run(arguments: argparse.Namespace, terminal: Terminal) -> None:
    from launch.benching.engines import Settings
    from launch.benching.measure import measure, turns_of
    from launch.benching.progress import SweepDisplay
    from launch.benching.recorder import Recorder
    from launch.benching.results_file import ResultsFile, complete_cases
    from launch.benching.subject import Subject
    from launch.benching.tracing import trace

    subject = Subject.of_config(arguments.config) if arguments.config else Subject.of_checkpoint(arguments.model)
    sweep = options.sweep_of(arguments, subject.config)
    about = _about(arguments, subject)
    file = None if arguments.json is None else ResultsFile(arguments.json, about, resumes=arguments.resume)
    expected = {case: sweep.forms_of(case) for case in sweep.cases()}
    complete = complete_cases(file.rows if file else [], expected)
    cases = [case for case in expected if case not in complete]
    settings = Settings(
        arguments.runs, arguments.warm_ups, arguments.patience, arguments.device, arguments.backend, arguments.gguf
    )
    with SweepDisplay(terminal, turns_of(sweep, cases, arguments.runs + arguments.warm_ups)) as display:
        recorder = Recorder(file, display)
        measure(sweep, cases, subject, settings, recorder)
        if arguments.profile is not None:
            trace(sweep, subject, settings, arguments.profile, recorder)
    _report(arguments, about, recorder, recorder.all_rows(expected), terminal)


def _report(
    arguments: argparse.Namespace, about: dict[str, Any], recorder: Recorder, rows: list[Row], terminal: Terminal
) -> None:
    from launch.benching.table import markdown

    failures = recorder.failure_lines()
    if arguments.markdown is not None:
        write("--markdown", arguments.markdown, markdown(about, rows, failures).encode())
        recorder.say(f"written: {arguments.markdown}")
    if arguments.plots is not None:
        from launch.benching.charts import charts
        from launch.benching.plots import draw

        for name, chart in charts(rows, about["model"]).items():
            path = arguments.plots / f"{name}.png"
            write("--plots", path, draw(chart))
            recorder.say(f"written: {path}")
    terminal.show(_tables(about, rows, failures, terminal))


def _tables(about: dict[str, Any], rows: list[Row], failures: list[str], terminal: Terminal) -> str:
    from rich.console import Console

    from launch.benching.table import about_text, print_tables

    width = terminal.console.width if terminal.out.isatty() else TABLE_WIDTH
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(about_text(about), soft_wrap=True, markup=False)
    print_tables(console, rows, failures)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def _device(asked: str) -> str:
    if asked != "auto":
        return asked
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _about(arguments: argparse.Namespace, subject: Subject) -> dict[str, Any]:
    """What all rows of a file are measured with, and on what."""
    from launch.info import gather

    machine = gather()
    return {
        "date": datetime.date.today().isoformat(),
        "version": tp.__version__,
        "model": subject.name,
        "weights": subject.weights,
        "config": subject.digest,
        "threads": arguments.threads,
        "runs": arguments.runs,
        "warm_ups": arguments.warm_ups,
        "device": arguments.device,
        "backend": arguments.backend,
        "machine": {name: machine[name] for name in ("cpu", "cores", "cpu_capability", "devices", "platform")},
        "packages": machine["packages"],
    }
