"""`inspect`: what every layer writes into the residual stream, and what makes a token likely."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch import inputs, output_files
from launch.arguments import add_layout_option, add_model_options, add_output_options, add_rank_options, place
from launch.generate import load_model
from launch.inspection.findings import Findings, Run
from launch.inspection.page import page
from launch.inspection.table import table
from launch.inspection.token_text import TokenTexts
from launch.model_command import ModelCommand, execute
from launch.rank_process import own_rank
from launch.terminal import Terminal
from tp.errors import RequestError

if TYPE_CHECKING:
    from tp.generation import LanguageModel
    from tp.parallel.group import TensorParallelGroup

NAMES = inputs.Names("--prompt", "--prompt-file", "--prompt-ids")
DESCRIPTION = """\
What every layer writes into the residual stream for a prompt, what each would predict (the logit lens), and which
sublayers and heads make the target's logit. A table, and with --html a report to look around in."""


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser("inspect", help="what each layer writes and predicts", description=DESCRIPTION)
    add_model_options(parser)
    inputs.add_options(parser, NAMES, "prompt")
    parser.add_argument(
        "--target",
        metavar="TOKEN",
        help='whose logit is explained: the text of one token, such as " Paris", or id:N (default: the likeliest)',
    )
    parser.add_argument("--against", metavar="TOKEN", help="explains the logit of the target minus that of this token")
    add_rank_options(parser)
    add_layout_option(parser)
    parser.add_argument("--html", type=place, metavar="FILE", help="writes a report with plots: one file, no network")
    parser.add_argument("--png", type=place, metavar="DIRECTORY", help="writes the plots as PNG files")
    add_output_options(parser)
    parser.set_defaults(execute=partial(execute, ModelCommand(check, run)))


def check(arguments: argparse.Namespace) -> None:
    """Refuses what cannot be served, before any rank starts.

    Raises:
        RequestError: more than one prompt, an empty target, or a path that cannot be written.
    """
    if len(arguments.texts) > 1 or len(arguments.ids) > 1:
        raise RequestError("inspect takes one prompt: run it once for each")
    for option, token in (("--target", arguments.target), ("--against", arguments.against)):
        if token == "":
            raise RequestError(f"{option} is empty: give the text of one token, or id:N")
        inputs.check_is_text(option, token or "")
    if own_rank() != 0:  # it writes nothing
        return
    if arguments.html is not None:
        output_files.check_file("--html", arguments.html)
    if arguments.png is not None:
        output_files.check_directory("--png", arguments.png)


def run(arguments: argparse.Namespace, group: TensorParallelGroup, terminal: Terminal) -> None:
    """Loads the model and looks at the prompt, on every rank; rank 0 writes."""
    from launch.inspection.gather import look
    from launch.inspection.progress import lens_progress
    from launch.inspection.question import Question

    model = load_model(arguments, group, terminal)
    question = Question.shared(arguments, model)
    with lens_progress(terminal) as progress:
        findings = look(model, question, _run_of(arguments, model), progress)
    texts = TokenTexts(model.tokenizer if group.rank == 0 else None)
    written = group.agree(lambda: _write(arguments, findings, texts) if group.rank == 0 else [])
    if not terminal.speaks:
        return
    shown = _json(findings, texts) if arguments.json else table(findings, texts)
    try:
        terminal.show(shown)
    except BrokenPipeError:
        terminal.abandon()
    for path in written:
        terminal.console.print(f"written: {path}", soft_wrap=True, markup=False)


def _run_of(arguments: argparse.Namespace, model: LanguageModel) -> Run:
    from tp.dtypes import dtype_name

    return Run(
        model=arguments.model,
        tp_size=model.group.size,
        dtype=dtype_name(model.dtype),
        weights=arguments.weights,
        device=model.group.device.type,
        norm_placement=model.config.norm_placement,
    )


def _json(findings: Findings, texts: TokenTexts) -> str:
    return json.dumps(findings.as_json(texts), ensure_ascii=False, allow_nan=False) + "\n"


def _write(arguments: argparse.Namespace, findings: Findings, texts: TokenTexts) -> list[Path]:
    """Writes the files that were asked for, and names them."""
    written = []
    if arguments.html is not None:
        output_files.write("--html", arguments.html, page(findings, texts).encode())
        written.append(arguments.html)
    if arguments.png is not None:
        from launch.inspection.figures import figures

        for name, content in figures(findings, texts).items():
            output_files.write("--png", arguments.png / name, content)
            written.append(arguments.png / name)
    return written
