"""The decoder as a user meets it: a model that encodes, generates and streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tp.config import ModelConfig
from tp.errors import CheckpointError, RequestError
from tp.generation.engine import GenerationSession, OnToken
from tp.generation.options import GenerationOptions
from tp.generation.request import Prompt, Request, context_limit, generation_request, share_request
from tp.generation.results import GenerationResult
from tp.generation.stream import TokenStream
from tp.models.causal_lm import CausalLM
from tp.parallel.group import TensorParallelGroup

if TYPE_CHECKING:
    from tp.checkpoint import LoadReport


class LanguageModel(CausalLM):
    """`CausalLM` with a tokenizer and generation. Every rank of the group calls the same methods.

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
        if max_batch_size is not None and max_batch_size < 1:
            raise RequestError(f"max_batch_size is {max_batch_size}: it must be at least 1")
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

    def generate(
        self,
        prompts: Sequence[Prompt] | None,
        options: GenerationOptions | None = None,
        *,
        on_token: OnToken | None = None,
    ) -> GenerationResult:
        """Continues every prompt.

        Prompts of different lengths run as one batch without padding; greedy unless the options say otherwise.

        Args:
            prompts: texts (see `tp.generation.chat` for conversations) or lists of token ids. Those of rank 0 count,
                as do its options; other ranks may pass None.
            on_token: see `OnToken`; rank 0's alone is called. What it raises is raised here, and on the other ranks as
                `RankFailedError`.

        Raises:
            RequestError: an empty prompt, ids outside the vocabulary, a prompt that fills the context, or options that
                contradict each other; on every rank.
            CapacityError: the KV cache does not fit in memory; on every rank.
        """
        session = self._open(prompts, options, on_token)
        while not session.finished:
            session.step()
        return session.result()

    def generate_stream(
        self, prompts: Sequence[Prompt] | None, options: GenerationOptions | None = None
    ) -> TokenStream:
        """As `generate`, but the tokens come one by one as `TokenEvent`, on every rank.

        The request is checked here; each step runs when its first token is asked for. Closing the stream on rank 0
        cancels it on every rank, see `TokenStream`.
        """
        return TokenStream(self._open(prompts, options, None), self.group.rank)

    def _open(
        self, prompts: Sequence[Prompt] | None, options: GenerationOptions | None, on_token: OnToken | None
    ) -> GenerationSession:
        began = time.perf_counter()

        def make() -> Request:
            return generation_request(self, prompts, options or GenerationOptions())

        return GenerationSession(self, share_request(self, make), began, on_token)
