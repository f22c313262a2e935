"""Decode steps captured as CUDA graphs: the launches of a whole step, collectives included, replayed as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tp.choice import enabled, warn_once
from tp.layers.embedding import ShardedLogits
from tp.layers.kv_cache import KVCache
from tp.layers.step import Step
from tp.models.causal_lm import CausalLM

NAME = "cuda_graphs"
"""For `tp.choice`."""
WARM_UP_RUNS = 2
"""Before a capture: kernels are compiled and libraries allocate what must not be allocated inside."""

Replay = Callable[[], object]
"""Does again what was captured, on the tensors that it was captured with."""
Capture = Callable[[Callable[[], ShardedLogits]], tuple[Replay, ShardedLogits]]
"""Captures a computation and gives what replays it, and the tensors that its result will be found in."""


def capture_on_cuda(run: Callable[[], ShardedLogits]) -> tuple[Replay, ShardedLogits]:
    """A CUDA graph of `run`, which must not look at any value on the host."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_RUNS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        logits = run()
    return graph.replay, logits


def supports_decode_graphs(model: CausalLM) -> bool:
    """Whether nothing in a decode step of this model depends on values that the host knows."""
    return model.group.device.type == "cuda" and model.config.rope.rope_type != "dynamic" and enabled(NAME)


@dataclass(frozen=True)
class CapturedStep:
    """A step of fixed size: its inputs, what replays it, and its result, all in tensors that stay where they are."""

    token_ids: Tensor
    slots: Tensor
    starts: Tensor
    scratch_slot: int
    replay: Replay
    logits: ShardedLogits

    def run(self, step: Step) -> ShardedLogits:
        """The logits of `step`, which may have fewer sequences than the captured one; valid until the next run."""
        count = step.num_tokens
        for static, given in ((self.token_ids, step.token_ids), (self.slots, step.slots), (self.starts, step.starts)):
            static[:count].copy_(given)
        self.slots[count:] = self.scratch_slot
        self.starts[count:] = 0
        self.replay()
        return replace(self.logits, local=self.logits.local[:count])


class DecodeGraphs:
    """Runs decode steps of one model and cache from graphs of a few batch sizes: 1, 2, 4, 8, and so on.

    Smaller batches are padded, and what the padding computes goes to the last slot of the cache, which no sequence
    uses. Each graph's first logits are compared with those of the plain step on every rank; if they differ on any,
    all ranks go on without graphs, with one warning.

    Args:
        cache: with one slot more than there are sequences.
        capture: how a computation is captured.
    """

    def __init__(self, model: CausalLM, cache: KVCache, capture: Capture = capture_on_cuda) -> None:
        self._model = model
        self._cache = cache
        self._capture = capture
        self._captured: dict[int, CapturedStep] = {}
        self._trusted = True

    def next_token_logits(self, step: Step) -> ShardedLogits:
        """As the model's own `next_token_logits`, for a step with one token of each sequence."""
        if not self._trusted:
            return self._model.next_token_logits(step, self._cache)
        size = min(2 ** (step.num_tokens - 1).bit_length(), self._cache.num_slots - 1)
        if size in self._captured:
            return self._captured[size].run(step)
        plain = self._model.next_token_logits(step, self._cache)
        captured = self._capture_step(size)
        if self._agrees(captured.run(step), plain):
            self._captured[size] = captured
        else:
            self._trusted = False
            warn_once(NAME, f"a captured decode step of {size} sequences gave other logits than the plain one")
        return plain

    def _capture_step(self, size: int) -> CapturedStep:
        device = self._model.group.device
        token_ids, starts = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(2))
        scratch_slot = self._cache.num_slots - 1
        slots = torch.full_like(starts, scratch_slot)
        step = Step.of_decode(token_ids, slots, starts)
        replay, logits = self._capture(lambda: self._model.next_token_logits(step, self._cache))
        return CapturedStep(token_ids, slots, starts, scratch_slot, replay, logits)

    def _agrees(self, logits: ShardedLogits, plain: ShardedLogits) -> bool:
        """Whether both are the same but for rounding, on every rank."""
        bound = 8 * torch.finfo(plain.local.dtype).eps * plain.local.float().abs().amax()
        own = bool(((logits.local.float() - plain.local.float()).abs() <= bound).all())
        return all(self._model.group.communicator.all_gather_object(own))
