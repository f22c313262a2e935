"""Where the parts run, and how large what they run is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.kernels import Sizes
from tp.config import ModelConfig
from tp.generation.decode_graphs import Capture, CudaGraph, Replay, Run
from tp.layers import ShardedLogits
from tp.parallel.communicator import AloneCommunicator
from tp.rope_config import RopeConfig


@dataclass(frozen=True)
class Machine:
    """A GPU, or the CPU of a dry run, on which times mean nothing.

    Attributes:
        checked: dtypes in which kernels are checked.
        rows, widths: of what they are checked on; the first width where one will do.
        heads: (query heads, KV heads, degree, rank, head_dim) of the attention that is checked.
        kernels: sizes of the cases that are timed.
        models: what decodes, by name.
        dtype: of the models.
        batches: sequences that decode at once.
        prompt, prefill, new_tokens: lengths of sequences.
        runs: measurements of each case that count.
        capture: of a decode step.
    """

    device: torch.device
    checked: tuple[torch.dtype, ...]
    rows: int
    widths: tuple[int, ...]
    heads: tuple[tuple[int, int, int, int, int], ...]
    kernels: Sizes
    models: dict[str, ModelConfig]
    dtype: torch.dtype
    batches: tuple[int, ...]
    prompt: int
    prefill: int
    new_tokens: int
    runs: int
    capture: Capture

    @property
    def compiles(self) -> bool:
        """Whether kernels are compiled, so that times are worth telling."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Waits for what was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def qwen2(
    hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, vocab: int, tied: bool
) -> ModelConfig:
    """A Qwen2 of a given shape."""
    return ModelConfig(
        model_type="qwen2", hidden_size=hidden, num_layers=layers, num_attention_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, intermediate_size=intermediate, vocab_size=vocab, max_position_embeddings=32768,
        rope=RopeConfig(rope_theta=1e6), qkv_bias=True, tie_word_embeddings=tied,
    )  # fmt: skip


def the_gpu() -> Machine:
    """The current CUDA device, with the shapes of real models."""
    return Machine(
        device=torch.device("cuda", torch.cuda.current_device()),
        checked=(torch.float32, torch.bfloat16, torch.float16), rows=37, widths=(896, 3584, 2051),
        heads=((14, 2, 1, 0, 64), (28, 4, 1, 0, 128), (10, 5, 3, 1, 20)),
        kernels=Sizes(),
        models={
            "0.5B": qwen2(896, 24, 14, 2, 64, 4864, 151936, tied=True),
            "1.5B": qwen2(1536, 28, 12, 2, 128, 8960, 151936, tied=True),
            "7B": qwen2(3584, 28, 28, 4, 128, 18944, 152064, tied=False),
        },
        dtype=torch.bfloat16, batches=(1, 8), prompt=64, prefill=512, new_tokens=64, runs=20,
        capture=CudaGraph(AloneCommunicator()),
    )  # fmt: skip


def the_cpu() -> Machine:
    """A dry run in Triton's interpreter."""
    return Machine(
        device=torch.device("cpu"),
        checked=(torch.bfloat16,), rows=5, widths=(37,), heads=((3, 1, 1, 0, 8),),
        kernels=Sizes(512, (37,), (20,), ((3, 1, 8),), ((1, 2, 1, 8, 20),), ((1, 9, 20), (3, 9, 20)), (3, 50)),
        models={"tiny": qwen2(16, 1, 2, 1, 8, 24, 50, tied=True)},
        dtype=torch.float32, batches=(1, 2), prompt=3, prefill=5, new_tokens=2, runs=1,
        capture=PlayedCapture(AloneCommunicator()),
    )  # fmt: skip


class PlayedCapture(CudaGraph):
    """A capture where there are none: computes anew, into the tensors of the first result."""

    def __call__(self, run: Run) -> tuple[Replay, ShardedLogits]:
        """See `Capture`."""
        kept = run()
        return lambda: kept.local.copy_(run().local), kept
