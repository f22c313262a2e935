"""A decoder with what requests need to know of it: its tokenizer, the ids that end a sequence, and its limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tp.config import ModelConfig
from tp.errors import CheckpointError, RequestError
from tp.models.causal_lm import CausalLM
from tp.parallel.group import TensorParallelGroup

if TYPE_CHECKING:
    from tp.checkpoint import LoadReport


class TextModel(CausalLM):
    """`CausalLM` with a tokenizer and limits: what requests, the engine and scoring work on.

    Args:
        config, group, dtype, device: see `CausalLM`.
        max_batch_size: sequences that are in the KV cache at once; more prompts wait for their turn. By default all.
        max_context: most tokens of a sequence, prompt and new ones. By default what the model was made for; the
            cache then holds what the request needs.

    Raises:
        RequestError: max_batch_size or max_context out of range.

    Attributes:
        context: most tokens of a sequence.
        eos_token_ids: ids that end a sequence.
        load_report: what loading read, where the model came from a checkpoint.
    """

    def __init__(
        self,
        config: ModelConfig,
        group: TensorParallelGroup | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        max_batch_size: int | None = None,
        max_context: int | None = None,
    ) -> None:
        super().__init__(config, group, dtype=dtype, device=device)
        if max_batch_size is not None and (type(max_batch_size) is not int or max_batch_size < 1):
            raise RequestError(f"max_batch_size is {max_batch_size!r}: it must be an integer of at least 1")
        self.context = context_limit(config, max_context)
        self.max_batch_size = max_batch_size
        self.max_context = max_context
        self.eos_token_ids: tuple[int, ...] = config.eos_token_ids
        self.load_report: LoadReport | None = None
        self._tokenizer: Any = None
        self._load_tokenizer: Callable[[], Any] | None = None
        self._tokenizer_error = "it has none"

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, loaded when first asked for, or None where there is none. Rank 0 needs it."""
        if self._load_tokenizer is not None:
            load, self._load_tokenizer = self._load_tokenizer, None
            try:
                self._tokenizer = load()
            except CheckpointError as error:
                self._tokenizer_error = str(error)
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer, self._load_tokenizer = tokenizer, None

    def set_tokenizer_loader(self, load: Callable[[], Any]) -> None:
        """Gives the model a tokenizer that is loaded when first asked for; a `CheckpointError` means there is none."""
        self._load_tokenizer = load

    def require_tokenizer(self) -> Any:
        """The tokenizer.

        Raises:
            RequestError: there is none, with the reason.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise RequestError(f"text needs the model's tokenizer, and {self._tokenizer_error}: give token ids instead")
        return tokenizer


def context_limit(config: ModelConfig, max_context: int | None = None) -> int:
    """Most tokens of a sequence: `max_context` where it is given, else what the model was made for.

    Raises:
        RequestError: `max_context` is not positive, or above what the model was made for.
    """
    longest = config.longest_context
    if max_context is None:
        return longest
    if type(max_context) is not int or not 1 <= max_context <= longest:
        raise RequestError(f"max_context is {max_context!r}: this model takes 1 to {longest} tokens")
    return max_context
