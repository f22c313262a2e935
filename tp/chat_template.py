"""Conversations through a checkpoint's chat template, which is a program: sandboxed, and within limits.

transformers runs it in jinja's sandbox, which keeps it to its own values. What that leaves are loops without end and
strings without bound: here a template has `SECONDS` and `FREE_BYTES`.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from tp.errors import RequestError, first_line

SECONDS = 10.0
FREE_BYTES = 2**30
LONGEST_TEXT = 2**26
"""Characters that a template may make of messages."""


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False) -> str:
    """The text that the tokenizer's chat template makes of the messages.

    Raises:
        RequestError: the template refuses the messages, fails, or takes more than it may.
    """
    try:
        _check_operators(tokenizer.get_chat_template())
        with _limits():
            text: str = tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=add_generation_prompt
            )
        if len(text) > LONGEST_TEXT:
            raise ValueError(f"it makes {len(text)} characters of them")
    except Exception as error:  # besides refusing, it may divide by zero
        raise RequestError(f"the model's chat template refuses these messages: {first_line(error)}") from error
    return text


def _check_operators(template: str) -> None:
    """A power of powers takes hours in one step of the interpreter, where nothing can stop it."""
    from jinja2 import Environment

    if any(kind == "operator" and value == "**" for _, kind, value in Environment().lex(template)):
        raise ValueError("it computes powers, which no template needs")


@contextmanager
def _limits() -> Iterator[None]:
    """Ends what runs within, line by line of Python, after `SECONDS`, and refuses it more than `FREE_BYTES`."""
    deadline = time.monotonic() + SECONDS

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > deadline:
            raise TimeoutError(f"it takes more than {SECONDS:g} s")
        return trace

    traced, (soft, hard) = sys.gettrace(), resource.getrlimit(resource.RLIMIT_AS)
    with suppress(OSError):  # only Linux says how much is in use
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + FREE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard))
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(traced)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
