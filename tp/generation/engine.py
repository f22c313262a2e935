"""The loop that turns prompts into sequences: one step of the model, one decision of rank 0, shared by all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from tp.errors import RankFailedError
from tp.generation.decisions import Cancelled, Decision, Failed, NewTokens, NotFinite, share
from tp.generation.decode_graphs import DecodeGraphs, capture_for
from tp.generation.incremental_text import incremental_texts
from tp.generation.not_finite import not_finite
from tp.generation.request import Request
from tp.generation.results import GeneratedSequence, GenerationResult, Timings, TokenEvent
from tp.generation.sampler import Candidates, Sampler
from tp.generation.scheduler import Piece, Scheduler, SequenceState, step_of
from tp.generation.sequence_text import SequenceText
from tp.generation.text_model import TextModel
from tp.layers.kv_cache import KVCache
from tp.layers.sharded_logits import ShardedLogits

OnToken = Callable[[TokenEvent], object]
"""Called on rank 0 with each new token; returning True ends that sequence, which is then "cancelled"."""


class GenerationSession:
    """One request being served. Every rank makes one and calls `step` until `finished`.

    A step ends in one broadcast from rank 0: new ids, texts, finish reasons, cancellation, errors. So whatever rank 0
    meets, its callbacks and its stream's consumer included, the other ranks hear of in the same step and none waits.

    Args:
        request: equal on all ranks, from `share_request`.
        began: when the request came, on this rank's `time.perf_counter`.
        on_token: see `OnToken`; not called on other ranks than 0.

    Attributes:
        finished: there is nothing left to do, for whatever reason.
    """

    def __init__(self, model: TextModel, request: Request, began: float, on_token: OnToken | None = None) -> None:
        options = request.options
        self._model = model
        self._group = model.group
        self._end_ids = () if options.ignore_eos else model.eos_token_ids
        self._states = [SequenceState(index, prompt) for index, prompt in enumerate(request.prompts)]
        self._scheduler = Scheduler(self._states, request.num_slots, options.prefill_chunk)
        self._sampler = Sampler(options, self._end_ids, model.config.vocab_size)
        capture = capture_for(model)
        self._cache: KVCache | None = KVCache(
            model.config, self._group, request.num_slots, request.capacity, dtype=model.dtype, device=self._group.device
        )
        self._graphs = DecodeGraphs(model, self._cache, capture) if capture else None
        self._kv_bytes = self._cache.nbytes
        self._texts = self._make_texts(request) if self._group.rank == 0 else []
        self._prefill_chunk = options.prefill_chunk
        self._on_token = on_token
        self._began = began
        self._decode_seconds = 0.0
        self._decode_tokens = 0
        self.finished = False

    @torch.no_grad()
    def step(self, *, cancel: bool = False, failure: BaseException | None = None) -> list[TokenEvent]:
        """Runs one step on every rank and returns its new tokens, possibly none while prompts are processed.

        Args:
            cancel: rank 0 wants no more; the step's tokens are dropped and every sequence ends as "cancelled".
            failure: rank 0's consumer raised this; it becomes an error on the other ranks.

        Raises:
            RankFailedError: on the other ranks, where rank 0 failed.
            NumericalError: logits that are not finite; on all ranks alike, naming where they first arise.
        """
        step_began = time.perf_counter()
        self.finished = True  # unless this step comes to its end: after an error in the model the ranks are out of step
        pieces = self._scheduler.next_pieces()
        decoding = pieces[0].state.decoding
        giving = [piece.state for piece in pieces if piece.gives_token]
        logits = self._run_model(pieces)
        candidates = self._sampler.candidates(logits, giving) if logits is not None else None
        own: Decision | None = None
        if self._group.rank == 0:
            try:
                if failure is not None:
                    raise failure
                own = Cancelled() if cancel else self._decide(giving, candidates)
            except BaseException as error:  # the other ranks wait for this step's decision, whatever happened
                failure = error
                own = Failed(f"rank 0 raised {type(error).__name__}: {error}")
        decision = share(own, len(giving), self._group)
        if isinstance(decision, NotFinite):
            cache = self._give_up_cache()
            raise not_finite(self._model, cache, self._states[decision.index], self._prefill_chunk)
        if isinstance(decision, Failed):
            self._give_up_cache()
            raise failure if failure is not None else RankFailedError(decision.reason)
        events = decision.events if isinstance(decision, NewTokens) else ()
        self._apply(events)
        self._scheduler.done(pieces)
        self.finished = isinstance(decision, Cancelled) or not self._scheduler.unfinished
        if self.finished:
            self._give_up_cache()
        if decoding:
            self._decode_seconds += time.perf_counter() - step_began
            self._decode_tokens += len(events)
        return list(events)

    def result(self) -> GenerationResult:
        """All sequences; those that have not finished count as cancelled."""
        sequences = tuple(
            GeneratedSequence(
                state.index,
                state.prompt_ids,
                tuple(state.new_ids),
                "".join(state.texts),
                state.finish_reason or "cancelled",
                tuple(state.logprobs),
            )
            for state in self._states
        )
        return GenerationResult(sequences, self._timings(), self._kv_bytes)

    def _run_model(self, pieces: Sequence[Piece]) -> ShardedLogits | None:
        """Logits of the sequences that get a token in this step, None where only parts of prompts are processed."""
        assert self._cache is not None
        step = step_of(pieces, self._group.device)
        rows = [row for row, piece in enumerate(pieces) if piece.gives_token]
        if not rows:
            self._model.extend_cache(step, self._cache)
            return None
        if self._graphs is not None and pieces[0].state.decoding:  # then all running sequences are
            logits = self._graphs.next_token_logits(step)
        else:
            logits = self._model.next_token_logits(step, self._cache)
        if len(rows) == len(pieces):
            return logits
        return ShardedLogits(logits.local[rows], logits.group, logits.vocab_size)

    def _decide(self, states: Sequence[SequenceState], candidates: Candidates | None) -> Decision:
        chosen = self._sampler.choose(candidates, states) if candidates is not None else []
        for state, (_, logprob) in zip(states, chosen, strict=True):
            if not math.isfinite(logprob):
                return NotFinite(state.index)
        events = []
        for state, (token_id, logprob) in zip(states, chosen, strict=True):
            text, finish_reason = self._texts[state.index].advance(token_id)
            event = TokenEvent(state.index, token_id, text, logprob, finish_reason)
            if self._on_token is not None and self._on_token(event) is True and finish_reason is None:
                event = TokenEvent(state.index, token_id, text, logprob, "cancelled")
            events.append(event)
        return NewTokens(tuple(events))

    def _apply(self, events: Sequence[TokenEvent]) -> None:
        now = time.perf_counter()
        for event in events:
            state = self._states[event.index]
            state.first_token_at = state.first_token_at or now
            state.last_token_at = now
            state.new_ids.append(event.token_id)
            state.logprobs.append(event.logprob)
            state.texts.append(event.text)
            state.finish_reason = event.finish_reason
            if event.finish_reason is not None:
                self._sampler.forget(state)

    def _give_up_cache(self) -> KVCache:
        """Nothing of this session holds it any more."""
        assert self._cache is not None
        cache, self._cache, self._graphs = self._cache, None, None
        return cache

    def _make_texts(self, request: Request) -> list[SequenceText]:
        room = min(request.context, request.capacity)
        texts = incremental_texts(self._model.tokenizer, len(request.prompts))
        return [
            SequenceText(text, request.options, self._end_ids, room - len(prompt))
            for text, prompt in zip(texts, request.prompts, strict=True)
        ]

    def _timings(self) -> Timings:
        started = [state for state in self._states if state.new_ids]
        paces = [
            (state.last_token_at - state.first_token_at) / (len(state.new_ids) - 1)
            for state in started
            if len(state.new_ids) > 1
        ]
        return Timings(
            ttft_s=min(state.first_token_at for state in started) - self._began if started else 0.0,
            tpot_s=sum(paces) / len(paces) if paces else 0.0,
            tokens_per_s=self._decode_tokens / self._decode_seconds if self._decode_seconds else 0.0,
        )
