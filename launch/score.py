"""`score`: how likely the model finds a text: log-probability of each token, and perplexity."""

from __future__ import annotations

import argparse
import json
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from launch import inputs
from launch.arguments import add_layout_option, add_model_options, add_output_options, add_rank_options
from launch.generate import load_model
from launch.model_command import ModelCommand, execute
from launch.terminal import Terminal
from tp.checkpoint.tokenizer import as_checkpoint_error
from tp.errors import RequestError

if TYPE_CHECKING:
    from tp.generation import LanguageModel, Score
    from tp.parallel.group import TensorParallelGroup

NAMES = inputs.Names("--text", "--file", "--ids")
DESCRIPTION = "How likely the model finds a text: log-probability of each token, and perplexity."


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser("score", help="log-probabilities and perplexity of a text", description=DESCRIPTION)
    add_model_options(parser)
    inputs.add_options(parser, NAMES, "text")
    add_rank_options(parser)
    add_layout_option(parser)
    add_output_options(parser)
    parser.set_defaults(execute=partial(execute, ModelCommand(check, run)))


def check(arguments: argparse.Namespace) -> None:
    """Refuses what cannot be served, before any rank starts.

    Raises:
        RequestError: more than one text.
    """
    if len(arguments.texts) > 1 or len(arguments.ids) > 1:
        raise RequestError("score takes one text: run it once for each")


def run(arguments: argparse.Namespace, group: TensorParallelGroup, terminal: Terminal) -> None:
    """Loads the model and scores the text, on every rank."""
    from tp.generation import score

    model = load_model(arguments, group, terminal)
    (text,) = group.agree(lambda: inputs.of(arguments) if group.rank == 0 else [None])
    scored = score(model, text)
    if not terminal.speaks:
        return
    shown = _json(arguments, model, scored) if arguments.json else _lines(arguments.model, model, scored)
    try:
        terminal.show(shown)
    except BrokenPipeError:
        terminal.abandon()


def _json(arguments: argparse.Namespace, model: LanguageModel, scored: Score) -> str:
    from tp.dtypes import dtype_name

    content = {
        "model": arguments.model,
        "tp_size": model.group.size,
        "dtype": dtype_name(model.dtype),
        "weights": arguments.weights,
        "device": model.group.device.type,
        "token_ids": scored.token_ids,
        "tokens": _tokens(model, scored),
        "logprobs": scored.logprobs,
        "perplexity": scored.perplexity if math.isfinite(scored.perplexity) else None,  # JSON has no infinity
    }
    return json.dumps(content, ensure_ascii=False) + "\n"


def _lines(name: str, model: LanguageModel, scored: Score) -> str:
    """A row a token: log-probability, id, text; the first token has nothing before it, and so no probability."""
    tokens = _tokens(model, scored) or [""] * len(scored.token_ids)
    logprobs = ["-", *(f"{logprob:.4f}" for logprob in scored.logprobs)]
    rows = [
        f"{logprob:>10}  {token_id:>8}  {json.dumps(token, ensure_ascii=False) if token else ''}".rstrip()
        for logprob, token_id, token in zip(logprobs, scored.token_ids, tokens, strict=True)
    ]
    summary = f"perplexity {scored.perplexity:.4f} over {len(scored.logprobs)} tokens"
    return "\n".join([f"{'logprob':>10}  {'id':>8}  token", *rows, summary]) + "\n"


def _tokens(model: LanguageModel, scored: Score) -> list[str] | None:
    """The text of each token alone; None without a tokenizer."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return None
    with as_checkpoint_error("the model's tokenizer fails on the text's tokens"):
        return [tokenizer.decode([token_id]) for token_id in scored.token_ids]
