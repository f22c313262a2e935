"""What `train` refuses before any rank starts, and what a run that goes on says of itself."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.arguments import check_config, check_model
from launch.training_recipe import RECIPE, Recipe
from tp.errors import CheckpointError, RequestError


def check(arguments: argparse.Namespace) -> None:
    """Refuses what cannot be served, before any rank starts.

    Raises:
        RequestError, CheckpointError, ConfigError: in one line, what and why.
    """
    saved = saved_run(arguments)
    recipe = Recipe.of(arguments, None if saved is None else saved[RECIPE])
    micro_batch_size(arguments, recipe)
    _check_model(arguments, recipe, resumes=saved is not None)
    _check_data(arguments, recipe)


def saved_run(arguments: argparse.Namespace) -> Mapping[str, Any] | None:
    """The run.json of the checkpoint to resume from; None where the run begins.

    Raises:
        RequestError: the output directory is in use, and not to be resumed. CheckpointError: a damaged run.json.
    """
    from tp.training.store import CheckpointStore, read_run

    output = Path(arguments.output)
    if output.exists() and not output.is_dir():
        raise RequestError(f"--output {output} is not a directory")
    if not arguments.resume:
        if output.exists() and any(output.iterdir()):
            raise RequestError(f"--output {output} is not empty: --resume goes on with the run that is there")
        return None
    store = CheckpointStore(output)
    if not store.steps():
        return None
    run = read_run(store.path_of(store.steps()[-1]))
    if not isinstance(run.get(RECIPE), dict):
        raise CheckpointError(f"{store.path_of(store.steps()[-1])}: its run.json has no recipe: not of this command")
    return run


def micro_batch_size(arguments: argparse.Namespace, recipe: Recipe) -> int:
    """Rows at once on a rank.

    Raises:
        RequestError: the global batch cannot be divided so.
    """
    given: int | None = arguments.micro_batch_size
    replicas: int = arguments.dp
    rows = recipe.batch_size
    if rows % replicas:
        raise RequestError(f"--batch-size {rows} is not a multiple of --dp {replicas}: replicas get rows evenly")
    if given is not None and (rows // replicas) % given:
        raise RequestError(
            f"--batch-size {rows} over --dp {replicas} leaves {rows // replicas} rows a replica: no multiple of "
            f"--micro-batch-size {given}"
        )
    return given or rows // replicas


def _check_model(arguments: argparse.Namespace, recipe: Recipe, resumes: bool) -> None:
    if arguments.model and arguments.config:
        raise RequestError("--model and --config contradict each other: fine-tune one, or begin with the other")
    if not (arguments.model or arguments.config or resumes):
        raise RequestError("--model (to fine-tune) or --config (to begin from nothing) is missing")
    tokenizers = [arguments.tokenizer, arguments.train_tokenizer]
    if arguments.config and not resumes and tokenizers.count(None) != 1:
        raise RequestError("--config needs a tokenizer: one of --tokenizer DIR and --train-tokenizer V")
    if not arguments.config and tokenizers.count(None) != 2:
        raise RequestError("--tokenizer and --train-tokenizer go with --config: a checkpoint brings its own")
    if arguments.config:
        check_config(arguments.config, arguments.tp)
    if arguments.model:
        check_model(arguments.model, arguments.tp)
    if arguments.tokenizer is not None and not os.path.isdir(os.path.expanduser(arguments.tokenizer)):
        raise RequestError(f"--tokenizer {arguments.tokenizer} is not a directory")


def _check_data(arguments: argparse.Namespace, recipe: Recipe) -> None:
    from tp.training.data.documents import is_jsonl

    if arguments.eval_data and recipe.eval_fraction is not None:
        raise RequestError("--eval-data and --eval-fraction contradict each other: held-out files, or a held-out part")
    for path in arguments.eval_data:
        if path.resolve() in [other.resolve() for other in arguments.data]:
            raise RequestError(f"{path} is in --data and in --eval-data: a held-out file is not trained on")
    for path in [*arguments.data, *arguments.eval_data]:
        if not path.is_file():
            raise RequestError(f"{path} is not a file to read: --data and --eval-data take text and JSONL files")
        is_jsonl(path)
    if arguments.evaluate_every and not arguments.eval_data and recipe.eval_fraction is None:
        raise RequestError("--evaluate-every needs --eval-data or --eval-fraction")
