"""Reading text and JSONL files as documents, a line at a time, every complaint with its file and line.

Text (.txt, .text, .md): documents are separated by lines that are exactly `<|document|>`; a file without such a line
is one document. The line break before a separator, or at the end of the file, is not part of the document.

JSONL (.jsonl, .ndjson): an object a line, in one of three shapes; other fields are left alone, blank lines skipped.

    {"text": "…"}                                          the loss is on everything
    {"prompt": "…", "completion": "…"}                     the loss is on the completion
    {"messages": [{"role": "user", "content": "…"}, …]}    the loss is on the assistant's turns

Documents without any text are skipped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp.errors import RequestError

SEPARATOR = "<|document|>"
"""A line that is exactly this separates the documents of a text file."""

TEXT_SUFFIXES = (".txt", ".text", ".md")
JSONL_SUFFIXES = (".jsonl", ".ndjson")

LONGEST_LINE = 2**28
"""Bytes: far above what can be tokenized at once."""

_SHAPES = (("text",), ("prompt", "completion"), ("messages",))
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class PlainText:
    """Plain text, all of which is learned. `place`, here and below: the file and line where it begins."""

    text: str
    place: str = "a text"

    def fingerprint(self) -> int:
        """A hash of the content, here and below: 64 bits, the same wherever the document stands."""
        return _hash("text", self.text)


@dataclass(frozen=True)
class PromptAndCompletion:
    """A prompt that is given and a completion that is learned."""

    prompt: str
    completion: str
    place: str = "a prompt and completion"

    def fingerprint(self) -> int:
        return _hash("prompt and completion", self.prompt, self.completion)


@dataclass(frozen=True)
class Conversation:
    """Messages in order, each with the fields that the file gave it; the assistant's turns are learned."""

    messages: tuple[dict[str, Any], ...]
    place: str = "a conversation"

    def fingerprint(self) -> int:
        return _hash("conversation", *self.messages)


Document = PlainText | PromptAndCompletion | Conversation
Lines = Iterator[tuple[int, str]]


def read_documents(
    paths: Iterable[str | Path], separator: str = SEPARATOR, advance: Callable[[int], None] = lambda num_bytes: None
) -> Iterator[Document]:
    """The documents of files, in order. Only one document is in memory at a time.

    Args:
        paths: text and JSONL files.
        separator: the line between the documents of a text file.
        advance: called after each line that was read with its length in bytes.

    Raises:
        RequestError: a file that is absent, unreadable, of an unknown kind or not UTF-8; a line that is not one of the
            shapes above. Names the file and the line.
    """
    for path in map(Path, paths):
        lines = _lines(path, advance)
        for document in _read_jsonl(lines, path) if is_jsonl(path) else _read_text(lines, path, separator):
            if not isinstance(document, PlainText) or document.text.strip():
                yield document


def is_jsonl(path: Path) -> bool:
    """Whether a file is read as JSONL; otherwise it is read as text.

    Raises:
        RequestError: its name ends in something else.
    """
    if path.suffix.lower() in JSONL_SUFFIXES:
        return True
    if path.suffix.lower() in TEXT_SUFFIXES:
        return False
    known = ", ".join((*TEXT_SUFFIXES, *JSONL_SUFFIXES))
    raise RequestError(f"{path} is not a kind of file that training reads: its name must end in one of {known}")


def _read_text(lines: Lines, path: Path, separator: str) -> Iterator[PlainText]:
    current: list[str] = []
    first = 1
    for number, line in lines:
        if line.removesuffix("\n").removesuffix("\r") == separator:
            yield _text_of(current, path, first)
            current, first = [], number + 1
        else:
            current.append(line)
    yield _text_of(current, path, first)


def _text_of(lines: Sequence[str], path: Path, first: int) -> PlainText:
    return PlainText("".join(lines).removesuffix("\n").removesuffix("\r"), _place(path, first))


def _read_jsonl(lines: Lines, path: Path) -> Iterator[Document]:
    for number, line in lines:
        if not line.strip():
            continue
        place = _place(path, number)
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{place}: not valid JSON: {error}") from error
        yield _document_of(record, place)


def _document_of(record: Any, place: str) -> Document:
    if not isinstance(record, dict):
        raise RequestError(f"{place}: holds a {type(record).__name__}, not a JSON object")
    shapes = [shape for shape in _SHAPES if any(field in record for field in shape)]
    if len(shapes) != 1:
        found = ", ".join(map(repr, list(record)[:6])) or "no fields"
        raise RequestError(f'{place}: needs "text", or "messages", or "prompt" and "completion"; it has {found}')
    if shapes[0] == ("messages",):
        return Conversation(_messages_of(record["messages"], place), place)
    values = [_string(record, field, place) for field in shapes[0]]
    if len(values) == 1:
        return PlainText(values[0], place)
    if not values[1]:
        raise RequestError(f'{place}: "completion" is empty: there is nothing to learn')
    return PromptAndCompletion(values[0], values[1], place)


def _messages_of(value: Any, place: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise RequestError(f'{place}: "messages" must be a list of objects with "role" and "content"')
    for index, message in enumerate(value, start=1):
        for field in ("role", "content"):
            _string(message, field, f"{place}: message {index}")
    if not any(message["role"] == "assistant" for message in value):
        raise RequestError(f'{place}: no message has the role "assistant": there is nothing to learn')
    return tuple(value)


def _string(record: dict[str, Any], field: str, place: str) -> str:
    value = record.get(field)
    if not isinstance(value, str):
        problem = f"is {json.dumps(value)[:40]}, not a string" if field in record else "is missing"
        raise RequestError(f'{place}: "{field}" {problem}')
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f'{place}: "{field}" holds half of a surrogate pair, which no text has') from error
    return value


def _lines(path: Path, advance: Callable[[int], None]) -> Lines:
    """Lines with their numbers from 1, each with its line break; nothing but a line feed ends a line."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
                if len(line) > LONGEST_LINE:
                    raise RequestError(f"{_place(path, number)}: a line of more than {LONGEST_LINE} bytes: divide it")
                try:
                    yield number, line.removeprefix(_BYTE_ORDER_MARK if number == 1 else b"").decode("utf-8")
                except UnicodeDecodeError as error:
                    raise RequestError(
                        f"{_place(path, number)}: byte {error.start + 1} of the line (0x{line[error.start]:02x}) "
                        "is not UTF-8: convert the file"
                    ) from error
                advance(len(line))
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}") from error


def _hash(*content: Any) -> int:
    canonical = json.dumps(content, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(canonical, digest_size=8).digest(), "little")


def _place(path: Path, line: int) -> str:
    return f"{path}, line {line}"
