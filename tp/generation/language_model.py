"""The decoder as a user meets it: a model that generates and streams."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tp.generation.engine import GenerationSession, OnToken
from tp.generation.options import GenerationOptions
from tp.generation.request import Prompt, Request, generation_request, share_request, statement_of_prompts
from tp.generation.results import GenerationResult
from tp.generation.stream import TokenStream
from tp.generation.text_model import TextModel
from tp.parallel.agreement import statement_of


class LanguageModel(TextModel):
    """A `TextModel` that generates; arguments as `TextModel`. Every rank of the group calls the same methods."""

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
            prompts: texts (see `tp.generation.chat` for conversations) or lists of token ids. Other ranks than 0 give
                the same prompts and options, or None.
            on_token: see `OnToken`; rank 0's alone is called. What it raises is raised here, and on the other ranks as
                `RankFailedError`.

        Raises:
            RequestError: an empty prompt, ids outside the vocabulary, a prompt that fills the context, or options that
                contradict each other; on every rank.
            CapacityError: the KV cache does not fit in memory; on every rank.
            CommunicationError: ranks whose models, prompts or options differ; on every rank.
            NumericalError: logits that are not finite; on every rank.
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

        own = options or (GenerationOptions() if self.group.rank == 0 else None)
        asked = {"call": "generate"} | statement_of_prompts(prompts) | (statement_of("option", own) if own else {})
        return GenerationSession(self, share_request(self, make, asked), began, on_token)
