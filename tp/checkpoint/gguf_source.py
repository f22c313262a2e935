"""Tensors in a GGUF file, decoded block by block into the Hub's layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from tp.checkpoint.file_reader import FileReader, read_plain
from tp.checkpoint.gguf_header import GgufHeader, GgufTensor
from tp.checkpoint.gguf_names import hub_name
from tp.checkpoint.gguf_rope import ROPE_FACTORS
from tp.checkpoint.tensor_source import StoredTensor, Window, as_matrix, chunks, num_columns, window_of
from tp.errors import CheckpointError
from tp.parallel.partition import ceil_div

_PLAIN = {
    gguf.GGMLQuantizationType.F64: torch.float64,
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
}


@dataclass(frozen=True)
class _Blocks:
    """Where a tensor's values lie and how they are packed.

    Attributes:
        block_size, block_bytes: elements along the last dimension that are packed together, and what they take.
        num_heads: heads whose rows the file holds in its own order, 0 where it holds the Hub's.
    """

    offset: int
    kind: gguf.GGMLQuantizationType
    block_size: int
    block_bytes: int
    num_heads: int


class GgufSource:
    """The tensors of a GGUF file under the Hub's names and in the Hub's order of rows.

    Files of the llama architecture hold the rows of q and k so that the two halves of each head, which the rotary
    embedding turns together, alternate (row 2·j + i of a head is the Hub's row i · head_dim/2 + j); those of other
    architectures do not. The frequency factors of the rotary embedding are settings, read with the configuration,
    and no tensor here.

    Args:
        num_heads, num_kv_heads: heads of q and of k.

    Raises:
        CheckpointError: the file is truncated, or part of a split one.
    """

    def __init__(self, header: GgufHeader, num_heads: int, num_kv_heads: int) -> None:
        permuted = header.metadata.get("general.architecture") == "llama"
        self._permuted_heads = {"attn_q": num_heads, "attn_k": num_kv_heads} if permuted else {}
        self.tensors: dict[str, StoredTensor] = {}
        self._file = FileReader(header.path)
        self._blocks: dict[str, _Blocks] = {}
        if (num_files := header.metadata.get("split.count", 0)) not in (0, 1):
            raise CheckpointError(f"{header.path} is one of {num_files} parts: join them with llama-gguf-split --merge")
        for name, tensor in header.tensors.items():
            if name != ROPE_FACTORS:
                self._add(header, name, tensor)
        self._check_apart()

    def read_into(self, name: str, dim: int, start: int, length: int, out: Tensor) -> int:
        stored, blocks = self.tensors[name], self._blocks[name]
        assert stored.torch_dtype is not None, f"{name} is {stored.dtype}"
        window = window_of(stored.shape, dim, start, length)
        columns = num_columns(stored.shape)
        if blocks.kind in _PLAIN and not blocks.num_heads:
            return read_plain(self._file, blocks.offset, columns, _PLAIN[blocks.kind], window, out)
        if out.numel() == 0:
            return 0
        head_dim = stored.shape[0] // blocks.num_heads if blocks.num_heads else 1
        return self._decode(blocks, columns, head_dim, window, as_matrix(out))

    def close(self) -> None:
        self._file.close()

    def _add(self, header: GgufHeader, gguf_name: str, tensor: GgufTensor) -> None:
        name = hub_name(gguf_name) or gguf_name
        if name in self.tensors:
            raise CheckpointError(f"{header.path} is damaged: two of its tensors are {name}")
        try:
            kind = gguf.GGMLQuantizationType(tensor.type_id)
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            self.tensors[name] = StoredTensor(tensor.shape, f"ggml type {tensor.type_id}", None)
            return
        if tensor.shape and tensor.shape[-1] % block_size:
            raise CheckpointError(f"{header.path}: rows of {gguf_name} are no whole blocks of {kind.name}")
        end = tensor.offset + tensor.numel // block_size * block_bytes
        size = header.path.stat().st_size
        if end > size:
            raise CheckpointError(
                f"{header.path} is truncated: {gguf_name} ends at byte {end} of {size}, fetch it again"
            )
        heads = self._permuted_heads.get(gguf_name.split(".")[-2] if "." in gguf_name else "", 0)
        if heads and (not tensor.shape or tensor.shape[0] % (2 * heads)):
            raise CheckpointError(f"{header.path}: {gguf_name} {list(tensor.shape)} is not made of {heads} heads")
        self.tensors[name] = StoredTensor(tensor.shape, kind.name, _decoded_dtype(kind, block_bytes))
        self._blocks[name] = _Blocks(tensor.offset, kind, block_size, block_bytes, heads)

    def _check_apart(self) -> None:
        """No two tensors share bytes."""
        end = 0
        for name, blocks in sorted(self._blocks.items(), key=lambda item: item[1].offset):
            if blocks.offset < end:
                raise CheckpointError(f"{self._file.path} is damaged: {name} shares bytes with the tensor before it")
            end = blocks.offset + self.tensors[name].numel // blocks.block_size * blocks.block_bytes

    def _decode(self, blocks: _Blocks, columns: int, head_dim: int, window: Window, target: Tensor) -> int:
        """Decodes the blocks and whole heads that cover a window, some rows at a time, and copies what lies inside."""
        first_block = window.columns.start // blocks.block_size
        num_blocks = ceil_div(window.columns.stop, blocks.block_size) - first_block
        run_bytes = num_blocks * blocks.block_bytes
        row_bytes = columns // blocks.block_size * blocks.block_bytes
        skipped = window.columns.start - first_block * blocks.block_size
        covering = range(
            window.rows.start // head_dim * head_dim,
            ceil_div(window.rows.stop, head_dim) * head_dim,
        )
        for rows in chunks(covering, num_blocks * blocks.block_size * 4, multiple=head_dim):
            packed = np.empty((len(rows), run_bytes), dtype=np.uint8)
            origin = blocks.offset + rows.start * row_bytes + first_block * blocks.block_bytes
            self._file.read_runs(origin, run_bytes, row_bytes, packed.reshape(-1).data)
            values = torch.from_numpy(_values(packed, blocks.kind))
            if blocks.num_heads:
                values = _hub_row_order(values, head_dim)
            inside = range(max(rows.start, window.rows.start), min(rows.stop, window.rows.stop))
            block = values[inside.start - rows.start : inside.stop - rows.start]
            first = inside.start - window.rows.start
            target[first : first + len(inside)].copy_(block[:, skipped : skipped + len(window.columns)])
        return len(covering) * run_bytes


def _decoded_dtype(kind: gguf.GGMLQuantizationType, block_bytes: int) -> torch.dtype | None:
    """What reading gives: the plain type itself, float32 from blocks, None from what gguf cannot decode."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    try:
        gguf.dequantize(np.zeros((1, block_bytes), dtype=np.uint8), kind)
    except NotImplementedError:
        return None
    return torch.float32


def _values(packed: np.ndarray[Any, np.dtype[np.uint8]], kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Elements [rows, columns] of packed rows [rows, bytes]."""
    if kind == gguf.GGMLQuantizationType.F64:
        return packed.view(np.float64)
    decoded: np.ndarray[Any, Any] = gguf.dequantize(packed, kind)
    return decoded


def _hub_row_order(values: Tensor, head_dim: int) -> Tensor:
    """Puts the rows of whole heads from alternating halves back to one half after the other."""
    heads = values.view(-1, head_dim // 2, 2, values.shape[1])
    return heads.transpose(1, 2).reshape(values.shape)
