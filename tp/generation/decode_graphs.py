"""Decode steps captured once and replayed: what a step launches or calls, collectives included, without its Python.

On CUDA a capture is a CUDA graph; on a CPU it is a tape of the C++ library's calls, see `tp.native.tape`.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tp.choice import enabled, warn_once
from tp.config import ModelConfig
from tp.errors import first_line
from tp.kernels.cache_attention import MAX_HEAD_DIM
from tp.kernels.decode_attention import has_decode_attention
from tp.kernels.linear import FEW_ROWS
from tp.kernels.triton.use import DTYPES as TRITON_DTYPES
from tp.kernels.triton.use import is_installed
from tp.layers.kv_cache import KVCache
from tp.layers.sharded_logits import ShardedLogits
from tp.layers.step import Step
from tp.models.causal_lm import CausalLM
from tp.native.operation import DTYPES as NATIVE_DTYPES
from tp.native.tape import Tape
from tp.parallel.communicator import AloneCommunicator, Communicator, NativeCommunicator
from tp.parallel.shared_memory import SharedMemoryCommunicator

NAME = "decode_graphs"
"""For `tp.choice`."""
HOOKED = "a module has hooks, which a captured step would not call"
REPLACED = "the model's weights were replaced while it generates"
WARM_UP_RUNS = 2
"""Before a capture on CUDA: kernels are compiled and libraries allocate what must not be allocated inside."""

Run = Callable[[], ShardedLogits]
Replay = Callable[[], object]
"""Does again what was captured, on the tensors that it was captured with."""


class CaptureError(Exception):
    """A step that cannot be captured, or whose capture gave something else than the step."""


class Capture(Protocol):
    """How computations are captured on a kind of device."""

    most_sequences: int
    """Larger steps are not captured."""
    most_kept: int
    """Captured steps that are kept, those used last: each holds all that its step computes on the way."""
    steps_before: int
    """Of a size, before one is captured: none where a capture costs little more than a step."""

    def size(self, num_sequences: int) -> int:
        """Sequences of the captured step that serves so many."""
        ...

    def __call__(self, run: Run) -> tuple[Replay, ShardedLogits]:
        """Runs `run` once and gives what replays it, and the tensors that hold its first and later results.

        Raises:
            CaptureError: see there; nothing is to be replayed.
        """
        ...


class CudaGraph:
    """Captures into CUDA graphs of a few batch sizes: powers of two."""

    most_sequences = 256
    most_kept = 9
    steps_before = 1

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def size(self, num_sequences: int) -> int:
        result: int = 2 ** (num_sequences - 1).bit_length()
        return result

    def __call__(self, run: Run) -> tuple[Replay, ShardedLogits]:
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                plain = run()
        current.wait_stream(stream)
        graph, failure = torch.cuda.CUDAGraph(), None
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                logits = run()
        except RuntimeError as error:
            torch.cuda.set_stream(current)  # a capture that fails leaves its own
            failure = first_line(error)
        if reasons := list(filter(None, self._communicator.all_gather_object(failure))):  # before collectives replay
            raise CaptureError(f"CUDA cannot capture a step: {reasons[0]}")
        graph.replay()
        bound = 8 * torch.finfo(plain.local.dtype).eps * plain.local.float().abs().amax()
        if not bool(((logits.local.float() - plain.local.float()).abs() <= bound).all()):
            raise CaptureError("a CUDA graph gave other logits than the step that it was captured from")

        def replay() -> None:
            self._communicator.check_usable()
            graph.replay()

        return replay, logits


class NativeTape:
    """Captures the calls of the C++ library that a step makes; it must consist of nothing else."""

    most_sequences = FEW_ROWS
    most_kept = 4
    steps_before = 0

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def size(self, num_sequences: int) -> int:
        return num_sequences

    def __call__(self, run: Run) -> tuple[Replay, ShardedLogits]:
        tape, watch = Tape(), _Watch()
        with watch, tape.recording():
            logits = run()
        if watch.computing:
            raise CaptureError(f"a step calls {', '.join(sorted(watch.computing))} of torch")

        def replay() -> None:
            assert watch.tensors  # what the tape's addresses point to
            tape.replay(self._communicator.complete)

        return replay, logits


MAKING = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


@cache
def _computes(func: torch._ops.OpOverload) -> bool:
    return not func.is_view and func.overloadpacket.__name__ not in MAKING


class _Watch(TorchDispatchMode):
    """Keeps every tensor that torch makes, and notes the operations that do more than to make or view one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[Any] = []
        self.computing: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, for a second, to tell it to keep away

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.tensors.append(result)
        if _computes(func):
            self.computing.add(str(func))
        return result


class Weights:
    """The parameters and buffers of a model's modules: captured steps read them where they lie now.

    Their memory is kept until a replacement is seen: `parameter.data = …` alone would free what is replayed.
    """

    def __init__(self, model: CausalLM) -> None:
        owners = (owner for module in model.modules() for owner in (module._parameters, module._buffers))
        self._owners = [owner for owner in owners if owner]
        self._found = self._now()
        self._memory = [tensor.detach() for tensor in self._found]
        self._addresses = list(map(Tensor.data_ptr, self._memory))

    def were_replaced(self) -> bool:
        """Whether any has become another tensor, or lies elsewhere; asked at every step.

        As after `tp.models.prepare_for_inference`, or after torch's `Module.to`, which keeps the parameters.
        """
        now = self._now()
        if list(map(Tensor.data_ptr, now)) == self._addresses and all(map(operator.is_, now, self._found)):
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """Keeps no memory any more; from now on they count as replaced."""
        for kept in (self._found, self._memory, self._addresses):
            kept.clear()

    def _now(self) -> list[Tensor]:
        return [tensor for owner in self._owners for tensor in owner.values() if tensor is not None]


def has_hooks(model: CausalLM) -> bool:
    """Whether torch calls something else around a module's forward, which is Python."""
    of_modules = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return of_modules or bool(torch.nn.modules.module._has_any_global_hook())


def can_be_captured(config: ModelConfig, dtype: torch.dtype, device_type: str) -> bool:
    """Whether the decode steps of such a model are made of kernels that can be captured, where these are at hand.

    On CUDA the plain form of attention to the cache cannot: it depends on what only the host knows. On a CPU nothing
    that is plain torch can: its MLP, its norms, its attention.
    """
    if config.rope.rope_type == "dynamic":
        return False
    if device_type == "cuda":
        return dtype in TRITON_DTYPES and config.head_dim <= MAX_HEAD_DIM
    gated_by_silu = config.gated_mlp and config.activation == "silu"
    fused_norms = config.norm == "rms_norm" and config.norm_placement == "pre"
    return dtype in NATIVE_DTYPES and gated_by_silu and fused_norms


def capture_for(model: CausalLM) -> Capture | None:
    """How decode steps of this model are captured; None where they cannot be, as over gloo, or where that is off."""
    group, communicator = model.group, model.group.communicator
    at_hand = enabled(NAME) and has_decode_attention(model.dtype, group.device)
    if not at_hand or not can_be_captured(model.config, model.dtype, group.device.type):
        return None
    if group.device.type == "cuda":
        on_the_device = isinstance(communicator, (AloneCommunicator, NativeCommunicator))
        return CudaGraph(communicator) if on_the_device and is_installed(NAME) else None
    in_memory = isinstance(communicator, (AloneCommunicator, SharedMemoryCommunicator))
    return NativeTape(communicator) if in_memory else None


@dataclass(frozen=True)
class CapturedStep:
    """A step of fixed size: its inputs and its result, in tensors that stay where they are, and what replays it."""

    token_ids: Tensor
    slots: Tensor
    starts: Tensor
    replay: Replay
    logits: ShardedLogits

    def run(self, step: Step) -> ShardedLogits:
        """The logits of `step`, which may have fewer sequences than the captured one; valid until the next run."""
        fill(self.token_ids, self.slots, self.starts, step)
        self.replay()
        return self.of(step)

    def of(self, step: Step) -> ShardedLogits:
        """The rows of the result that belong to `step`, not to padding."""
        return replace(self.logits, local=self.logits.local[: step.num_tokens])


class DecodeGraphs:
    """Runs decode steps of one model and cache, each size captured once it has come often enough.

    Where a step cannot be captured on some rank, all ranks go on without, with one warning. A rank whose weights were
    replaced since runs by itself what others replay. Hooks of modules are seen when a step is captured: those that come
    later miss the steps that are replayed.

    A step without all slots of the cache may be padded: then token 0 is written to position 0 of a slot that is not in
    it. So every slot that is in use has to be in every step.
    """

    def __init__(self, model: CausalLM, cache: KVCache, capture: Capture) -> None:
        self._model = model
        self._cache = cache
        self._capture = capture
        self._captured: dict[int, CapturedStep] = {}
        self._met: Counter[int] = Counter()
        self._weights = Weights(model)
        self._refused = False

    def next_token_logits(self, step: Step) -> ShardedLogits:
        """As the model's own `next_token_logits`, for a step with one token of each sequence."""
        self._cache.check_room(step)
        tapped = self._model.model.tap is not None  # a tap is Python, and sees every step
        if self._refused or tapped or step.num_tokens > self._capture.most_sequences:
            return self._model.next_token_logits(step, self._cache)
        size = min(self._capture.size(step.num_tokens), self._cache.num_slots)
        if (captured := self._captured.pop(size, None)) is not None:
            self._captured[size] = captured  # the one used last is the last
            if not self._weights.were_replaced():
                return captured.run(step)
            warn_once(NAME, REPLACED)
        elif self._came_often_enough(size) and (captured := self._capture_step(size, step)) is not None:
            if len(self._captured) == self._capture.most_kept:
                del self._captured[next(iter(self._captured))]
            self._captured[size] = captured
            return captured.of(step)
        return self._model.next_token_logits(step, self._cache)

    def _came_often_enough(self, size: int) -> bool:
        self._met[size] += 1
        return self._met[size] > self._capture.steps_before

    def _capture_step(self, size: int, step: Step) -> CapturedStep | None:
        """A capture of `step`, padded, which has been run; None where some rank cannot."""
        replaced, hooked = self._weights.were_replaced(), has_hooks(self._model)
        if self._some_rank_cannot(REPLACED if replaced else HOOKED if hooked else None):
            return None
        token_ids, slots, starts = (step.token_ids.new_zeros(size) for _ in range(3))
        fill(token_ids, slots, starts, step)
        static = Step.of_decode(token_ids, slots, starts)
        captured, reason = None, None
        try:
            replay, logits = self._capture(lambda: self._model.next_token_logits(static, self._cache))
            captured = CapturedStep(token_ids, slots, starts, replay, logits)
        except CaptureError as error:
            reason = str(error)
        return None if self._some_rank_cannot(reason) else captured

    def _some_rank_cannot(self, reason: str | None) -> bool:
        """Whether any rank has a reason, which ends all captures."""
        reasons = list(filter(None, self._model.group.communicator.all_gather_object(reason)))
        if reasons:
            self._refuse(reasons[0])
        return bool(reasons)

    def _refuse(self, reason: str) -> None:
        self._refused = True
        self._captured.clear()
        self._weights.forget()
        warn_once(NAME, reason)


def fill(token_ids: Tensor, slots: Tensor, starts: Tensor, step: Step) -> None:
    """Puts a step into the inputs of a captured one; padding is token 0 at position 0 of the first slot left over."""
    count = step.num_tokens
    taken = {piece.slot for piece in step.sequences}
    left_over = next(slot for slot in range(count + 1) if slot not in taken)  # of the cache wherever there is padding
    for static, given, padding in (
        (token_ids, step.token_ids, 0),
        (slots, step.slots, left_over),
        (starts, step.starts, 0),
    ):
        static[:count].copy_(given)
        static[count:].fill_(padding)
