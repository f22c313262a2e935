"""Where a command's text comes from: options, a file, token ids, or standard input; one of them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.arguments import token_ids
from launch.ranks import STANDARD_INPUT
from tp.errors import RequestError


@dataclass(frozen=True)
class Names:
    """What a command calls its sources."""

    text: str
    file: str
    ids: str

    def __str__(self) -> str:
        return f"{self.text}, {self.file}, {self.ids}"


def add_options(parser: argparse.ArgumentParser, names: Names, what: str) -> None:
    """Adds the three options; they end up in `texts`, `text_file` and `ids`."""
    group = parser.add_argument_group(f"{what}: one of these, else standard input")
    group.add_argument(names.text, dest="texts", action="append", default=[], metavar="TEXT", help="may be repeated")
    group.add_argument(names.file, dest="text_file", metavar="PATH", help="a file whose whole text is taken")
    group.add_argument(
        names.ids,
        dest="ids",
        action="append",
        default=[],
        type=token_ids,
        metavar="1,2,3",
        help="token ids, for which no tokenizer is needed; may be repeated",
    )
    parser.set_defaults(input_names=names, standard_input="")


def check(arguments: argparse.Namespace) -> None:
    """Refuses contradictory or empty input; reads standard input if that is the source. Not on ranks other than 0.

    Raises:
        RequestError: see the messages.
    """
    names: Names = arguments.input_names
    chosen = [
        name
        for name, value in (
            (names.text, arguments.texts),
            (names.file, arguments.text_file),
            (names.ids, arguments.ids),
        )
        if value not in ([], None)
    ]
    if len(chosen) > 1:
        raise RequestError(f"{' and '.join(chosen)} contradict each other: give one of them")
    if not chosen:
        if sys.stdin is None or (sys.stdin.isatty() and STANDARD_INPUT not in os.environ):
            raise RequestError(f"nothing to work on: give one of {names}, or text on standard input")
        arguments.standard_input = _standard_input()
    texts = [] if arguments.ids else texts_of(arguments)
    for index, text in enumerate(texts):
        if not text:
            source = chosen[0] if chosen else "standard input"
            which = f" (number {index + 1} of {len(texts)})" if len(texts) > 1 else ""
            raise RequestError(f"{source} is empty{which}: there is nothing to work on")
        if any("\ud800" <= character <= "\udfff" for character in text):  # how Python passes bytes that are no text
            raise RequestError(f"{source} is not UTF-8 text")


def of(arguments: argparse.Namespace) -> Sequence[str] | Sequence[list[int]]:
    """The texts or lists of token ids. On rank 0 only, after `check`.

    Raises:
        RequestError: the file cannot be read.
    """
    ids: list[list[int]] = arguments.ids
    return ids or texts_of(arguments)


def texts_of(arguments: argparse.Namespace) -> list[str]:
    """The texts, where the source is not a list of ids.

    Raises:
        RequestError: the file cannot be read.
    """
    if arguments.text_file is None:
        return arguments.texts or [arguments.standard_input]
    try:
        return [_without_last_newline(Path(arguments.text_file).read_text(encoding="utf-8"))]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        name = arguments.input_names.file
        raise RequestError(f"{name} {arguments.text_file} cannot be read: {reason}") from error


def _standard_input() -> str:
    """What the launcher has read, or what there is to read."""
    path = os.environ.get(STANDARD_INPUT)
    try:
        content = Path(path).read_bytes() if path else sys.stdin.buffer.read()
        return _without_last_newline(content.decode())
    except UnicodeDecodeError as error:
        raise RequestError("standard input is not UTF-8 text") from error


def _without_last_newline(text: str) -> str:
    return text[:-1] if text.endswith("\n") else text
