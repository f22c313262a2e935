"""Attention over the KV cache: uneven groups of heads, lengths, windows, splits, far slots."""

from __future__ import annotations

import pytest
import torch
from bounds import DTYPES

from tp.kernels.cache_attention import QueryGroups, cache_attention, plain_cache_attention
from tp.kernels.triton import cache_attention as kernels
from tp.parallel.partition import uniform_runs

CAPACITY = 150
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Of values of order 1: an ulp of the dtype, and weights that are rounded to it."""


def _cache(device, dtype, kv_heads, head_dim, lengths, slots):
    """Keys and values, [5, KV heads, CAPACITY, d]; not numbers wherever no sequence of the batch has a token."""
    caches = []
    for _ in range(2):
        cache = torch.full((5, kv_heads, CAPACITY, head_dim), torch.nan)
        for slot, length in zip(slots, lengths, strict=True):
            cache[slot, :, :length] = torch.randn(kv_heads, length, head_dim)
        caches.append(cache.to(device, dtype))
    return caches


def _case(device, dtype, head_dim=20, lengths=(CAPACITY, 0, 77, 1), slots=(2, 0, 4, 1), split=(10, 5, 3, 1)):
    groups = QueryGroups.of_runs(uniform_runs(*split), device)
    q = (2 * torch.randn(len(lengths), sum(groups.sizes), head_dim)).to(device, dtype)
    key, value = _cache(device, dtype, len(groups.sizes), head_dim, lengths, slots)
    return q, key, value, torch.tensor(slots, device=device), torch.tensor(lengths, device=device), groups


def test_groups_of_heads_follow_the_partition():
    groups = QueryGroups.of_runs(uniform_runs(14, 2, 4, 1), "cpu")
    assert groups.sizes == (4,)
    groups = QueryGroups.of_runs(uniform_runs(10, 5, 3, 1), "cpu")
    assert groups.sizes == (1, 2)
    assert groups.bounds.tolist() == [0, 1, 3]


@pytest.mark.parametrize(
    "dtype, window", [*((dtype, 70) for dtype in DTYPES), *((DTYPES[0], window) for window in (None, 1, 1000))], ids=str
)
def test_attention_is_the_plain_one(device, dtype, window):
    case = _case(device, dtype)
    result, expected = cache_attention(*case, window), plain_cache_attention(*case, window)
    assert (result - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    assert torch.count_nonzero(result[1]) == 0


@pytest.mark.parametrize(
    "head_dim, split",
    [(2, (21, 3, 2, 1)), (20, (40, 1, 1, 0)), (128, (6, 6, 1, 0)), (256, (19, 1, 1, 0))],
    ids=str,
)
def test_attention_of_other_shapes(device, head_dim, split):
    """Against float64: the plain form in float32 is no nearer to it. Wide heads add up more terms a score."""
    bound = TOLERANCE[torch.float32] * (2 if head_dim >= 128 else 1)
    q, key, value, *where = _case(device, torch.float32, head_dim, (130,), (3,), split)
    exact = plain_cache_attention(q.double(), key.double(), value.double(), *where)
    result = cache_attention(q, key, value, *where)
    assert (result - exact).abs().max() <= bound * exact.abs().max()


def test_splits_of_several_blocks_and_32_bit_indices(device, monkeypatch):
    monkeypatch.setattr(kernels, "_MAX_SPLITS", 2)
    q, key, value, slots, lengths, groups = _case(device, torch.float32)
    result = cache_attention(q, key, value, slots.int(), lengths.int(), groups)
    expected = plain_cache_attention(q, key, value, slots, lengths, groups)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def test_scores_of_any_size_are_finite(device):
    q, *rest = _case(device, torch.float32, lengths=(100,), slots=(0,))
    case = (300 * q, *rest)
    torch.testing.assert_close(cache_attention(*case), plain_cache_attention(*case), rtol=1e-4, atol=1e-5)


def test_a_sequence_does_not_depend_on_its_neighbours(device):
    q, key, value, slots, lengths, groups = _case(device, torch.bfloat16)
    together = cache_attention(q, key, value, slots, lengths, groups)
    alone = cache_attention(q[2:3], key, value, slots[2:3], lengths[2:3], groups)
    assert torch.equal(together[2:3], alone)


def test_strided_queries_and_no_sequences(device):
    q, *rest = _case(device, torch.float32)
    fused = torch.cat([q, q, q], dim=1)
    assert torch.equal(cache_attention(fused[:, 3:6], *rest), cache_attention(q, *rest))
    key, value, slots, lengths, groups = rest
    assert cache_attention(q[:0], key, value, slots[:0], lengths[:0], groups).shape == (0, 3, 20)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_slots_heads_and_tokens_past_two_to_the_31(device, distant, dim):
    groups = QueryGroups(torch.tensor([0, 2, 3, 6], dtype=torch.int32, device=device), (2, 1, 3))
    key, value = (torch.randn(3, 3, 3, 6).to(device, torch.bfloat16) for _ in range(2))
    q = torch.randn(3, 6, 6).to(device, torch.bfloat16)
    indices = torch.tensor([2, 0, 1], device=device), torch.tensor([3, 1, 2], device=device)
    far_key, far_value = (distant(cache.transpose(0, dim)).transpose(0, dim) for cache in (key, value))
    near = cache_attention(q, key, value, *indices, groups)
    assert torch.equal(cache_attention(q, far_key, far_value, *indices, groups), near)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: a CUDA graph")
def test_a_captured_graph_serves_other_slots_and_lengths(device):
    q, key, value, slots, lengths, groups = _case(device, torch.bfloat16, lengths=(CAPACITY,) * 4)
    cache_attention(q, key, value, slots, lengths, groups)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cache_attention(q, key, value, slots, lengths, groups)
    slots.copy_(slots.flip(0))
    lengths.copy_(torch.tensor([3, 0, 100, CAPACITY], device=device))
    graph.replay()
    expected = plain_cache_attention(q, key, value, slots, lengths, groups)
    assert (captured - expected).abs().max() <= TOLERANCE[torch.bfloat16] * expected.abs().max()
