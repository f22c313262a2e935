"""Tokenizers and chat templates of checkpoints, through transformers. Code of a checkpoint is never run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tp.errors import CheckpointError, first_line
from tp.json_objects import LARGEST_BYTES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# One of these holds the vocabulary. Without any, transformers makes an empty tokenizer of the family and says nothing.
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "tekken.json", "*.tiktoken")
_BESIDE = ("*config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "*.jinja", "*/*.jinja")
"""What transformers reads together with them."""


def tokenizer_of_directory(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hub directory.

    Raises:
        CheckpointError: it has none that transformers can read without running code of the checkpoint.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    if not any(any(directory.glob(pattern)) for pattern in _VOCABULARIES):
        raise CheckpointError(f"{directory} has no tokenizer: give token ids, or a directory that has tokenizer.json")
    _check_files(directory)
    with as_checkpoint_error(f"{directory} has no tokenizer that can be used"):
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        tokenizer("a")  # settings of a wrong type are noticed only here
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def tokenizer_of_gguf(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer and chat template that a GGUF file carries.

    `AutoTokenizer` builds the same one, after reading the whole vocabulary with a slower reader for a config that
    it then does not need: seconds and hundreds of megabytes on every rank. It is asked where the shorter way,
    newer than the oldest transformers that we run with, fails.

    Raises:
        CheckpointError: the file carries none, or one that transformers does not know.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast(name_or_path=str(path.parent), gguf_file=path.name)
    except BaseException as error:
        if not _is_failure(error):
            raise
    with as_checkpoint_error(f"{path} has no tokenizer that can be used"):
        tokenizer = AutoTokenizer.from_pretrained(
            str(path.parent), gguf_file=path.name, local_files_only=True, trust_remote_code=False
        )
        tokenizer("a")
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def _check_files(directory: Path) -> None:
    """Before a library opens them: it would wait for a pipe, and read a file that has no end into memory."""
    for path in (path for pattern in (*_VOCABULARIES, *_BESIDE) for path in directory.glob(pattern)):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise CheckpointError(f"{path} cannot be read: it is not a regular file")
        if path.is_file() and path.stat().st_size > LARGEST_BYTES:
            raise CheckpointError(
                f"{path} has {path.stat().st_size} bytes: of a tokenizer no file of more than {LARGEST_BYTES} is read"
            )


@contextmanager
def as_checkpoint_error(subject: str) -> Iterator[None]:
    """What goes wrong within, in transformers, tokenizers and the JSON beneath, which raise whatever comes.

    Raises:
        CheckpointError: the subject, and what they say.
    """
    try:
        yield
    except BaseException as error:
        if not _is_failure(error):
            raise
        raise CheckpointError(f"{subject}: {first_line(error)}") from error


def _is_failure(error: BaseException) -> bool:
    """Whether it is the tokenizer's; an interrupt is not. A panic of the tokenizers library is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
