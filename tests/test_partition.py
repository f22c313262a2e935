"""Who owns what, as arithmetic: every head, feature and row exactly once, at every degree."""

from __future__ import annotations

import pytest
from tiny_models import hub_config

from tp.config import ModelConfig
from tp.errors import ConfigError
from tp.parallel.partition import (
    FEATURE_BLOCK,
    chunk_ranges,
    feature_ranges,
    kv_head_ranges,
    query_head_ranges,
    shared_parts,
    uniform_runs,
)

HEADS = [(14, 2), (9, 3), (28, 4), (4, 1), (4, 2), (12, 3), (6, 3), (5, 5), (7, 1), (64, 8)]


@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_heads_of_all_ranks_are_each_head_once_and_kv_heads_exactly_those_read(heads, kv_heads):
    for t in range(1, heads + 1):
        queries, keys = query_head_ranges(heads, t), kv_head_ranges(heads, kv_heads, t)
        assert [head for owned in queries for head in owned] == list(range(heads))
        for rank in range(t):
            assert len(queries[rank]) in (heads // t, -(-heads // t))
            assert sorted({h // (heads // kv_heads) for h in queries[rank]}) == list(keys[rank])


@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_uniform_runs_pair_each_query_head_with_its_kv_head(heads, kv_heads):
    for t in range(1, heads + 1):
        for rank in range(t):
            queries, keys = query_head_ranges(heads, t)[rank], kv_head_ranges(heads, kv_heads, t)[rank]
            runs = uniform_runs(heads, kv_heads, t, rank)
            assert 1 <= len(runs) <= 3
            pairs = [
                (queries.start + query, keys.start + run.kv_heads.start + offset // run.queries_per_kv_head)
                for run in runs
                for offset, query in enumerate(run.queries)
            ]
            assert pairs == [(head, head // (heads // kv_heads)) for head in queries]


def test_qwen2_7b_on_eight_ranks():
    """28 query heads on 8 ranks, which engines that divide refuse: 3 or 4 query heads, one or two KV heads a rank."""
    assert [len(r) for r in query_head_ranges(28, 8)] == [3, 4, 3, 4, 3, 4, 3, 4]
    assert [list(r) for r in kv_head_ranges(28, 4, 8)] == [[0], [0], [1], [1], [2], [2], [3], [3]]


def test_features_go_in_blocks_and_the_remainder_mirrors_that_of_heads():
    assert [len(r) for r in feature_ranges(1536, 7)] == [256, 192, 256, 192, 256, 192, 192]
    assert [len(r) for r in query_head_ranges(9, 2)] == [4, 5]
    assert [len(r) for r in feature_ranges(9 * FEATURE_BLOCK, 2)] == [5 * FEATURE_BLOCK, 4 * FEATURE_BLOCK]
    assert [len(r) for r in feature_ranges(203, 3)] == [128, 64, 11]  # 4 blocks, the last one short
    assert [len(r) for r in feature_ranges(75, 4)] == [19, 19, 19, 18]  # fewer blocks than ranks: 1 wide


@pytest.mark.parametrize("size", [1, 5, 48, 97, 4864])
@pytest.mark.parametrize("t", [1, 2, 3, 4, 7])
def test_features_and_chunks_cover_everything_once(size, t):
    for ranges in (feature_ranges(size, t), chunk_ranges(size, t)):
        assert len(ranges) == t
        assert [index for owned in ranges for index in owned] == list(range(size))


def test_late_ranks_may_own_no_vocabulary():
    assert chunk_ranges(5, 4) == (range(2), range(2, 4), range(4, 5), range(5, 5))


def test_parts_are_cut_where_the_set_of_sharers_changes():
    """6 query heads, 2 KV heads, t = 4: ranks 0 and 1 share head 0 with each other, 2 and 3 share head 1."""
    keys = kv_head_ranges(6, 2, 4)
    assert [list(r) for r in keys] == [[0], [0], [1], [1]]
    # 5 query heads a group on 3 ranks: the middle rank holds both heads, each shared with one neighbour
    keys = kv_head_ranges(10, 2, 3)
    assert [list(r) for r in keys] == [[0], [0, 1], [1]]
    parts = list(shared_parts("k_proj", keys, 1, unit=7, dim=0, local_start=100, global_length=14))
    facts = [(p.global_start, p.length, p.local_start, p.sharers) for p in parts]
    assert facts == [(0, 7, 100, (0, 1)), (7, 7, 107, (1, 2))]


def test_only_degrees_above_the_query_heads_are_refused():
    config = ModelConfig.from_hf(hub_config("llama"))
    for t in range(1, 10):
        config.check_degree(t)
    for t in (0, -1, 10):
        with pytest.raises(ConfigError, match=rf"degree {t} is outside 1..9.*num_attention_heads is 9"):
            config.check_degree(t)
