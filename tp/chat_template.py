"""Conversations through a checkpoint's chat template, which is a program: sandboxed, and within limits.

transformers runs it in jinja's sandbox, which keeps it to its own values. What that leaves are loops without end and
strings without bound: here a template has `SECONDS` and `FREE_BYTES`.

The time is looked at between steps of Python; within one, such as a product of numbers of millions of digits, by an
alarm, where the template runs on the main thread. A step that hears no signals, such as a sort of a long list of long
texts, is bounded by the memory alone: powers, which take longest, are refused.
"""

from __future__ import annotations

import functools
import resource
import signal
import sys
import threading
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


class OutOfTime(BaseException):
    """No `Exception`: jinja, which computes constants as it compiles, goes on after any, and the limits are spent."""

    def __init__(self) -> None:
        super().__init__(f"it takes more than {SECONDS:g} s")


_one_at_a_time = threading.Lock()
"""The limits are the process's, and each render puts back what it found."""


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False) -> str:
    """The text that the tokenizer's chat template makes of the messages.

    Meanwhile all threads of the process together can allocate no more than `FREE_BYTES`, and other templates wait.

    Raises:
        RequestError: the template refuses the messages, fails, or takes more than it may.
    """
    with _limited(tokenizer):
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=add_generation_prompt
        )
        _check_length(text)
    return text


def render_with_marks(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
    """As `render`, and which characters {% generation %} blocks of the template enclose: (start, end) of each."""
    from transformers.utils.chat_template_utils import render_jinja_template

    with _limited(tokenizer):
        (text,), (marks,) = render_jinja_template(
            conversations=[[dict(message) for message in messages]],
            chat_template=tokenizer.get_chat_template(),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
        _check_length(text)
    return text, marks


@contextmanager
def _limited(tokenizer: Any) -> Iterator[None]:
    """What the tokenizer's template does within is limited, and told as a refusal of its messages."""
    try:
        if _computes_powers(tokenizer.get_chat_template()):
            raise ValueError("it computes powers, which no template needs")
        with _one_at_a_time, _alarm(), _limits():
            yield
    except (Exception, OutOfTime) as error:  # besides refusing, it may divide by zero
        raise RequestError(f"the model's chat template refuses these messages: {first_line(error)}") from error


def _check_length(text: str) -> None:
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"it makes {len(text)} characters of them")


@functools.lru_cache(maxsize=8)
def _computes_powers(template: str) -> bool:
    """A power of powers takes hours in one step of the interpreter, where nothing can stop it.

    After "(" and "," the same sign unpacks keywords.
    """
    from jinja2 import Environment

    before = ""
    for _, kind, value in Environment().lex(template):
        if kind == "operator" and value == "**" and before not in ("(", ","):
            return True
        if kind != "whitespace":
            before = value
    return False


@contextmanager
def _alarm() -> Iterator[None]:
    """Ends a single long step after `SECONDS`; only the main thread hears it. Somebody else's alarm is left alone."""
    if threading.current_thread() is not threading.main_thread() or any(signal.getitimer(signal.ITIMER_REAL)):
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _limits() -> Iterator[None]:
    """Ends what runs within, line by line of Python, after `SECONDS`, and refuses the process more than `FREE_BYTES`.

    Linux counts the allocations of all threads together: they are all limited meanwhile.
    """
    deadline = time.monotonic() + SECONDS

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > deadline:
            raise OutOfTime
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
