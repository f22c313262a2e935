"""Reading slices of tensors from files: right values, in any place, and no byte more than needed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoint_samples import make_config, make_tensors, to_gguf_rows, write_gguf
from safetensors.torch import save_file

from tp.checkpoint import tensor_source
from tp.checkpoint.gguf_header import GgufHeader
from tp.checkpoint.gguf_source import GgufSource
from tp.checkpoint.safetensors_source import SafetensorsSource
from tp.errors import CheckpointError

Kind = gguf.GGMLQuantizationType
PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PLAIN_KINDS = (Kind.F32, Kind.F16, Kind.BF16, Kind.F64)


def is_decodable(kind: Kind) -> bool:
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


DECODABLE = [kind for kind in Kind if kind not in PLAIN_KINDS and is_decodable(kind)]


def numbered(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Distinct values that every dtype holds exactly, as long as there are at most 256 of them."""
    return torch.arange(rows * columns).reshape(rows, columns).to(dtype)


@pytest.fixture
def small_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every read of more than a few rows take several chunks."""
    monkeypatch.setattr(tensor_source, "STAGING_BYTES", 64)


@pytest.mark.parametrize("stored", PLAIN_DTYPES)
@pytest.mark.parametrize("wanted", PLAIN_DTYPES)
@pytest.mark.usefixtures("small_staging")
def test_slices_of_safetensors_in_every_dtype(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    matrix, vector = numbered(19, 13, stored), torch.arange(11).to(stored)
    save_file({"matrix": matrix, "vector": vector, "before": torch.ones(3)}, tmp_path / "file.safetensors")
    source = SafetensorsSource([tmp_path / "file.safetensors"])
    for dim, start, length in ((0, 0, 19), (0, 5, 7), (0, 18, 1), (0, 4, 0), (1, 0, 13), (1, 3, 5), (1, 12, 1)):
        expected = matrix.narrow(dim, start, length).to(wanted)
        out = torch.full_like(expected, -1)
        assert source.read_into("matrix", dim, start, length, out) == expected.numel() * stored.itemsize
        assert torch.equal(out, expected)
    out = torch.empty(4, dtype=wanted)
    assert source.read_into("vector", 0, 6, 4, out) == 4 * stored.itemsize
    assert out.tolist() == [6, 7, 8, 9]
    source.close()


@pytest.mark.parametrize("dim", [0, 1])
def test_values_go_into_strided_places_and_nowhere_else(tmp_path: Path, dim: int) -> None:
    matrix = numbered(12, 9, torch.float32)
    save_file({"matrix": matrix}, tmp_path / "file.safetensors")
    source = SafetensorsSource([tmp_path / "file.safetensors"])
    expected = matrix.narrow(dim, 2, 5)
    larger = torch.full((expected.shape[0] + 4, expected.shape[1] + 3), -1.0)
    for place in (larger[2:-2, 1:-2], larger.t()[1:-2, 2:-2].t()):
        larger.fill_(-1)
        source.read_into("matrix", dim, 2, 5, place)
        assert torch.equal(place, expected)
        assert (larger == -1).sum() == larger.numel() - expected.numel()


def test_several_files_are_one_checkpoint(tmp_path: Path) -> None:
    for number in range(3):
        save_file({f"t{number}": torch.full((2, 2), float(number))}, tmp_path / f"{number}.safetensors")
    source = SafetensorsSource(sorted(tmp_path.iterdir()))
    out = torch.empty(2, 2)
    for number in range(3):
        source.read_into(f"t{number}", 0, 0, 2, out)
        assert (out == number).all()
    save_file({"t1": torch.zeros(2)}, tmp_path / "3.safetensors")
    with pytest.raises(CheckpointError, match="t1 is in 1.safetensors and 3.safetensors"):
        SafetensorsSource(sorted(tmp_path.iterdir()))


def test_dtypes_that_are_no_weights_are_known_but_not_readable(tmp_path: Path) -> None:
    save_file({"ids": torch.arange(3), "small": torch.zeros(4).to(torch.float8_e4m3fn)}, tmp_path / "a.safetensors")
    tensors = SafetensorsSource([tmp_path / "a.safetensors"]).tensors
    assert {name: (tensor.dtype, tensor.torch_dtype) for name, tensor in tensors.items()} == {
        "ids": ("I64", None),
        "small": ("F8_E4M3", None),
    }


def rewritten(path: Path, header: bytes, values: bytes = b"") -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + values)
    return path


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "not a safetensors file, or is truncated"),
        (b"\x80\x02}q\x00.", "not a safetensors file, or is truncated"),
        (b"PK\x03\x04" + bytes(60), "not a safetensors file, or is truncated"),
        ((2**40).to_bytes(8, "little") + b"{}", "not a safetensors file, or is truncated"),
        ((5).to_bytes(8, "little") + b"[1,2]", "damaged safetensors header"),
        ((4).to_bytes(8, "little") + b"\xff\xff\xff\xff", "damaged safetensors header"),
        ((10**5).to_bytes(8, "little") + b"[" * 10**5, "damaged safetensors header"),
    ],
)
def test_what_is_no_safetensors_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as raised:
        SafetensorsSource([path])
    assert "model.safetensors" in str(raised.value)


@pytest.mark.parametrize(
    "entry, message",
    [
        ({"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "truncated: w ends at byte"),
        ({"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 20]}, "does not take the 20 bytes"),
        ({"dtype": "F32", "shape": [5], "data_offsets": [-20, 0]}, "begins before the values"),
        ({"dtype": "F32", "shape": [5]}, "damaged safetensors header"),
        ({"dtype": "F32", "shape": "5", "data_offsets": [0]}, "damaged safetensors header"),
        ([1], "damaged safetensors header"),
    ],
)
def test_headers_that_do_not_fit_their_values(tmp_path: Path, entry: object, message: str) -> None:
    path = rewritten(tmp_path / "a.safetensors", json.dumps({"w": entry}).encode(), bytes(20))
    with pytest.raises(CheckpointError, match=message):
        SafetensorsSource([path])


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.ones(100)}, path)
    source = SafetensorsSource([path])
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="truncated"):
        source.read_into("w", 0, 0, 100, torch.empty(100))
    path.unlink()
    source.close()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        source.read_into("w", 0, 0, 100, torch.empty(100))


def raw_gguf(
    path: Path, name: str, packed: np.ndarray, kind: Kind, architecture: str = "qwen2", heads: int = 2
) -> GgufSource:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tensor("first", np.ones(3, dtype=np.float32))
    writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufSource(GgufHeader.read(path), heads, heads)


@pytest.mark.parametrize("kind", DECODABLE, ids=lambda kind: kind.name)
@pytest.mark.usefixtures("small_staging")
def test_slices_of_every_quantisation_equal_slices_of_the_decoded_whole(tmp_path: Path, kind: Kind) -> None:
    """Random bits are a valid tensor of any quantisation; decoding rows, or covering blocks, must not change a bit."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    packed = np.random.default_rng(3).integers(0, 256, (6, 3 * block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        whole = torch.from_numpy(gguf.dequantize(packed, kind))
        source = raw_gguf(tmp_path / "a.gguf", "w", packed, kind)
        assert source.tensors["w"].torch_dtype == torch.float32
        assert source.tensors["w"].shape == (6, 3 * block_size)
        inner = (1, block_size - 5, block_size + 9)  # touches all three blocks
        for dim, start, length in ((0, 0, 6), (0, 1, 4), inner, (1, block_size, block_size), (1, block_size + 1, 3)):
            expected = whole.narrow(dim, start, length)
            out = torch.empty_like(expected)
            read = source.read_into("w", dim, start, length, out)
            assert torch.equal(out.view(torch.int32), expected.contiguous().view(torch.int32))
            blocks = length * 3 if dim == 0 else 6 * (3 if start < block_size else 1)
            assert read == blocks * block_bytes


def test_what_gguf_cannot_decode_is_known_but_not_readable(tmp_path: Path) -> None:
    source = raw_gguf(tmp_path / "a.gguf", "w", np.zeros((2, 40), dtype=np.uint8), Kind.Q8_1)
    assert source.tensors["w"].torch_dtype is None
    assert source.tensors["w"].dtype == "Q8_1"


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16])
@pytest.mark.usefixtures("small_staging")
def test_plain_gguf_columns_are_read_exactly(tmp_path: Path, kind: Kind) -> None:
    matrix = numbered(8, 20, torch.float32).numpy()
    source = raw_gguf(tmp_path / "a.gguf", "w", gguf.quantize(matrix, kind), kind)
    out = torch.empty(8, 7)
    assert source.read_into("w", 1, 9, 7, out) == 8 * 7 * gguf.GGML_QUANT_SIZES[kind][1]
    assert torch.equal(out, torch.from_numpy(matrix)[:, 9:16])


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0])
@pytest.mark.usefixtures("small_staging")
def test_llama_rows_of_q_and_k_come_back_in_the_order_of_the_hub(tmp_path: Path, kind: Kind) -> None:
    heads, head_dim = 3, 10
    matrix = np.random.default_rng(5).normal(size=(heads * head_dim, 64)).astype(np.float32)
    packed = gguf.quantize(to_gguf_rows(matrix, heads), kind)
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(matrix, kind), kind))
    for name, hub_name in (("attn_q", "q_proj"), ("attn_k", "k_proj")):
        source = raw_gguf(tmp_path / f"{name}.gguf", f"blk.0.{name}.weight", packed, kind, "llama", heads)
        out = torch.empty(30, 64)
        for start, length in ((0, 30), (10, 10), (10, 20), (7, 9), (13, 1)):
            row_bytes = packed[0].nbytes
            read = source.read_into(f"model.layers.0.self_attn.{hub_name}.weight", 0, start, length, out[:length])
            assert torch.equal(out[:length], expected[start : start + length])
            whole_heads = -(-(start + length) // head_dim) - start // head_dim
            assert read == whole_heads * head_dim * row_bytes


def test_a_split_or_damaged_gguf_file(tmp_path: Path) -> None:
    config = make_config(num_layers=1)
    path = write_gguf(tmp_path / "a.gguf", config, make_tensors(config))
    content = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[:-1000])
    with pytest.raises(CheckpointError, match="cut.gguf is truncated"):
        GgufSource(GgufHeader.read(cut), 6, 2)
    for length in itertools.chain(range(4, 64), range(64, 1500, 50)):
        cut.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="damaged or truncated"):
            GgufHeader.read(cut)
    for wrong, message in ((b"GGML" + content[4:], "not a GGUF"), (b"GGUF\0\0\0\3" + content[8:], "big-endian")):
        cut.write_bytes(wrong)
        with pytest.raises(CheckpointError, match=message):
            GgufHeader.read(cut)
    split = write_gguf(
        tmp_path / "b.gguf", config, make_tensors(config), settings=lambda w: w.add_uint16("split.count", 3)
    )
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        GgufSource(GgufHeader.read(split), 6, 2)


def test_a_gguf_header_with_absurd_counts_is_refused_at_once(tmp_path: Path) -> None:
    header = b"GGUF" + (3).to_bytes(4, "little")
    strings = header + (0).to_bytes(8, "little") + (1).to_bytes(8, "little") + (1).to_bytes(8, "little") + b"k"
    for item_kind in (8, 4):
        path = tmp_path / "a.gguf"
        array = (9).to_bytes(4, "little") + item_kind.to_bytes(4, "little") + (2**62).to_bytes(8, "little")
        path.write_bytes(strings + array + bytes(100))
        with pytest.raises(CheckpointError, match="damaged or truncated"):
            GgufHeader.read(path)
