"""Where a command's text comes from: options, a file, token ids, or standard input; one of them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from launch.arguments import token_ids
from launch.ranks import STANDARD_INPUT
from tp.errors import RequestError

LONGEST_BYTES = 2**24
"""Of a file or of standard input: above a million tokens of text. What has no end is not read to it."""


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
    group.add_argument(names.text, dest="texts", action="append", default=[], metavar="TEXT")
    group.add_argument(names.file, dest="text_file", metavar="PATH", help="a file whose whole text is taken")
    group.add_argument(
        names.ids,
        dest="ids",
        action="append",
        default=[],
        type=token_ids,
        metavar="1,2,3",
        help="token ids, for which no tokenizer is needed",
    )
    parser.set_defaults(input_names=names, text_read="")


def check(arguments: argparse.Namespace) -> None:
    """Refuses contradictory or empty input. Reads the file or standard input if that is the source, into `text_read`:
    once, since either may be a pipe. Not on ranks other than 0.

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
    source = chosen[0] if chosen else "standard input"
    if source in (names.file, "standard input"):
        arguments.text_read = _read(arguments)
    texts = [] if arguments.ids else arguments.texts or [arguments.text_read]
    for index, text in enumerate(texts):
        if not text:
            which = f" (number {index + 1} of {len(texts)})" if len(texts) > 1 else ""
            raise RequestError(f"{source} is empty{which}: there is nothing to work on")
        check_is_text(source, text)


def check_is_text(source: str, text: str) -> None:
    """Refuses what was given on the command line in bytes that are no text.

    Raises:
        RequestError: naming the source.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):  # how Python passes such bytes
        raise RequestError(f"{source} is not UTF-8 text")


def of(arguments: argparse.Namespace) -> Sequence[str] | Sequence[list[int]]:
    """The texts or lists of token ids. On rank 0 only, after `check`."""
    ids: list[list[int]] = arguments.ids
    return ids or arguments.texts or [arguments.text_read]


def _read(arguments: argparse.Namespace) -> str:
    """The text of the file or of standard input: what the launcher has read of it, or what there is to read."""
    if path := os.environ.get(STANDARD_INPUT):
        return Path(path).read_bytes().decode()
    name = "standard input"
    try:
        if arguments.text_file is not None:
            name = f"{arguments.input_names.file} {arguments.text_file}"
            with open(arguments.text_file, "rb") as file:
                text = _text_of(file, name)
        elif sys.stdin.isatty():
            raise RequestError(f"nothing to work on: give one of {arguments.input_names}, or text on standard input")
        else:
            text = _text_of(sys.stdin.buffer, name)
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8 text") from error
    except OSError as error:
        raise RequestError(f"{name} cannot be read: {error.strerror}") from error
    return text.removesuffix("\n")


def _text_of(file: BinaryIO, name: str) -> str:
    content = file.read(LONGEST_BYTES + 1)
    if len(content) > LONGEST_BYTES:
        raise RequestError(f"{name} has more than {LONGEST_BYTES} bytes, which no model's context holds")
    return content.decode()
