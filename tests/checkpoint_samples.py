"""Small checkpoints in every format that is read, and ranks that are threads of one process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tp.checkpoint import open_checkpoint
from tp.checkpoint.loader import LoadReport
from tp.config import ModelConfig
from tp.layers.parameter import named_parts
from tp.models import CausalLM
from tp.parallel import Communicator, TensorParallelGroup
from tp.parallel.communicator import sum_in_rank_order
from tp.rope_config import RopeConfig

T = TypeVar("T")

BARRIER_TIMEOUT_S = 30


class ThreadCommunicator(Communicator):
    """Ranks that are threads: what a rank says is put in its place, then everyone looks at all places."""

    def __init__(self, rank: int, size: int, places: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, size)
        self._places, self._barrier = places, barrier

    def all_gather_object(self, value: Any) -> list[Any]:
        self._places[self.rank] = value
        self._barrier.wait(BARRIER_TIMEOUT_S)
        values = list(self._places)
        self._barrier.wait(BARRIER_TIMEOUT_S)
        return values

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        return sum_in_rank_order(self.all_gather_object(tensor.clone()))

    def _all_gather(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        return torch.cat(self.all_gather_object(tensor.clone()))

    def _reduce_scatter(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        return self._all_reduce(tensor).split(list(sizes))[self.rank]

    def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        whole: Tensor = self.all_gather_object(tensor.clone())[source]
        return whole


def on_ranks(tp_size: int, function: Callable[[TensorParallelGroup], T]) -> list[T]:
    """Runs `function(group)` on `tp_size` ranks and returns their results; raises what the lowest rank raised."""
    from transformers import AutoConfig  # noqa: F401  its lazy imports must not happen in several threads at once

    places: list[Any] = [None] * tp_size
    barrier = threading.Barrier(tp_size)

    def run(rank: int) -> T:
        try:
            return function(TensorParallelGroup(ThreadCommunicator(rank, tp_size, places, barrier)))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(tp_size) as pool:
        futures = [pool.submit(run, rank) for rank in range(tp_size)]
        errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


def make_config(model_type: str = "qwen2", **changes: Any) -> ModelConfig:
    """A decoder whose sizes all differ; widths are multiples of 32, so that they can be quantised."""
    traits: dict[str, dict[str, Any]] = {
        "qwen2": {"qkv_bias": True},
        "qwen3": {"qk_norm": True},
        "llama": {},
        "mistral": {},
    }
    sizes: dict[str, Any] = {
        "hidden_size": 96,
        "num_layers": 2,
        "num_attention_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 32,
        "intermediate_size": 160,
        "vocab_size": 97,
        "max_position_embeddings": 256,
        "rope": RopeConfig(rope_theta=50000.0),
        "norm_eps": 2.0**-20,
        "bos_token_id": 1,
        "eos_token_ids": (5,),
    }
    return ModelConfig(model_type=model_type, **(sizes | traits[model_type] | changes))


def make_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Every Hub tensor of a model, drawn at random; norms around 1, biases far from 0."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for parameter in named_parts(CausalLM(config, device="meta")):
        for part in parameter.parts:
            shape = list(parameter.tensor.shape)
            shape[part.dim] = part.global_length
            values = torch.randn(shape, generator=generator)
            tensors[part.name] = 1 + 0.3 * values if "norm" in part.name else 0.4 * values
    return tensors


def write_directory(directory: Path, config: ModelConfig, tensors: Mapping[str, Tensor], *, num_files: int = 1) -> Path:
    """A Hub directory with the tensors dealt out to `num_files` safetensors files."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config.to_hf()))
    if num_files == 1:
        save_file(dict(tensors), directory / "model.safetensors", {"format": "pt"})
        return directory
    table = {}
    for number in range(num_files):
        name = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        members = {key: tensors[key] for key in list(tensors)[number::num_files]}
        save_file(members, directory / name, {"format": "pt"})
        table |= dict.fromkeys(members, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return directory


GGUF_STEMS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(hub_name: str) -> str:
    stem, _, kind = hub_name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{GGUF_STEMS[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_STEMS[rest]}.{kind}"


def to_gguf_rows(values: np.ndarray, num_heads: int) -> np.ndarray:
    """The order that llama.cpp's converter gives the rows of q and k of a llama model."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    settings: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """A GGUF file: matrices in `kind` (or by Hub name in `kinds`), vectors in F32.

    Args:
        extra: further tensors under their GGUF names.
        settings: adds metadata.
    """
    architecture = "llama" if config.model_type == "mistral" else config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.rope_theta)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(5)
    writer.add_token_list([f"token {index}" for index in range(config.vocab_size)])
    settings(writer)
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        if architecture == "llama" and ".q_proj." in name:
            values = to_gguf_rows(values, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            values = to_gguf_rows(values, config.num_kv_heads)
        stored = (kinds or {}).get(name, kind) if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quantize(values, stored), raw_dtype=stored)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def materialise(model: CausalLM) -> CausalLM:
    """Gives a model of the meta device memory, all of it NaN, so that what is not loaded shows."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    return model


def load(
    path: Path, group: TensorParallelGroup, dtype: torch.dtype | None = torch.float32
) -> tuple[CausalLM, LoadReport]:
    """Opens a checkpoint and loads this rank's shard; `dtype` None takes the checkpoint's."""
    checkpoint = open_checkpoint(path, group)
    model = materialise(CausalLM(checkpoint.config, group, dtype=dtype or checkpoint.default_dtype, device="meta"))
    report = checkpoint.load_into(model)
    checkpoint.close()
    return model, report


def whole_tensors(models: Sequence[CausalLM]) -> dict[str, Tensor]:
    """Every Hub tensor, put together from the parts of all ranks' models; shared slices must be equal everywhere."""
    whole: dict[str, Tensor] = {}
    for model in models:
        for parameter in named_parts(model):
            for part in parameter.parts:
                shape = list(parameter.tensor.shape)
                shape[part.dim] = part.global_length
                nowhere = torch.full(shape, float("nan"), dtype=parameter.tensor.dtype)
                place = whole.setdefault(part.name, nowhere).narrow(part.dim, part.global_start, part.length)
                own = parameter.slice_of(part).detach()
                assert place.isnan().all() or torch.equal(place, own), part.name
                place.copy_(own)
    return whole


def assert_same_tensors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Same names, dtypes and bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name
