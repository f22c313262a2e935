"""Whether weights and cache fit: what is needed, what is free, one answer for all ranks."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from checkpoint_samples import make_config, on_ranks

from tp.checkpoint import MemoryBudget, check_fits, weight_bytes
from tp.checkpoint.free_memory import free_host_memory, free_memory
from tp.checkpoint.hosts import this_host
from tp.errors import CapacityError
from tp.layers.kv_cache import KVCache
from tp.models import CausalLM
from tp.parallel import TensorParallelGroup

CONFIG = make_config(num_attention_heads=6, num_kv_heads=3, head_dim=16, max_position_embeddings=1000)
# Of one KV head of 16 bfloat16 values: key and value, two layers.
BYTES_PER_TOKEN_AND_HEAD = 2 * 2 * 16 * 2


def budget(group: TensorParallelGroup, free: list[int], *, capacity: int = 10, weights: int = 0) -> MemoryBudget:
    return check_fits(
        CONFIG,
        group,
        weight_bytes=weights,
        num_slots=2,
        capacity=capacity,
        dtype=torch.bfloat16,
        free_bytes=free[group.rank],
    )


def test_weight_bytes_count_padding_and_tied_weights_once() -> None:
    for tied in (False, True):
        config = make_config(tie_word_embeddings=tied)
        model = CausalLM(config, dtype=torch.bfloat16, device="meta")
        real = CausalLM(config, dtype=torch.bfloat16)
        assert weight_bytes(model) == sum(p.nbytes for p in real.parameters())
    shards = on_ranks(2, lambda group: weight_bytes(CausalLM(CONFIG, group, device="meta")))
    whole = weight_bytes(CausalLM(CONFIG, device="meta"))
    replicated = 4 * 96 * 5  # five norms
    shared_head = 4 * 2 * (2 * 16 * 96 + 2 * 16)  # the middle one of three KV heads is on both ranks
    padding = 4 * 2 * 96  # a row of 98 in embedding and head
    assert sum(shards) == whole + replicated + shared_head + padding


def test_all_ranks_use_the_smallest_capacity() -> None:
    """Room for 100 tokens on one rank and 63 on the other is room for 63."""
    per_token = 2 * 2 * BYTES_PER_TOKEN_AND_HEAD  # two slots, two KV heads on each of two ranks
    budgets = on_ranks(2, lambda group: budget(group, [100 * per_token, 63 * per_token + 5]))
    assert [b.longest_context for b in budgets] == [63, 63]
    budgets = on_ranks(2, lambda group: budget(group, [10**12, 10**12]))
    assert [b.longest_context for b in budgets] == [1000, 1000], "never above the model's own context"


def test_too_little_names_needed_free_and_longest_on_every_rank() -> None:
    per_token = 2 * 2 * BYTES_PER_TOKEN_AND_HEAD
    weights = 50 * 2**20
    messages: list[str] = []

    def attempt(group: TensorParallelGroup, capacity: int) -> None:
        try:
            budget(group, [10**9, weights + 77 * per_token], capacity=capacity, weights=weights)
        except CapacityError as error:
            messages.append(str(error))

    on_ranks(2, lambda group: attempt(group, 77))
    assert messages == []
    on_ranks(2, lambda group: attempt(group, 78))
    assert len(messages) == 2 and len(set(messages)) == 1
    assert messages[0] == (
        "rank 1 needs 50.0 MiB (50.0 MiB of weights, 0.0 MiB of cache for 2 x 78 tokens), 50.0 MiB is free: "
        "the longest context that fits is 77 tokens"
    )


def test_weights_alone_may_be_too_much() -> None:
    with pytest.raises(CapacityError, match="needs 3.5 MiB .* 2.0 MiB is free: the longest context that fits is 0"):
        on_ranks(2, lambda group: budget(group, [2 * 2**20] * 2, capacity=1000, weights=3 * 2**20))


def test_the_cache_that_is_checked_is_the_cache_that_is_made() -> None:
    group = TensorParallelGroup.alone()
    cache = KVCache(CONFIG, group, 2, 10, dtype=torch.bfloat16)
    assert budget(group, [10**9]).cache_bytes == cache.nbytes == 2 * 10 * 3 * BYTES_PER_TOKEN_AND_HEAD


def test_free_memory_is_shared_by_the_ranks_of_a_machine() -> None:
    alone = free_memory(TensorParallelGroup.alone())
    shares = on_ranks(4, free_memory)
    assert alone > 2**20
    for share in shares:
        assert share == pytest.approx(alone / 4, rel=0.3)


@pytest.mark.parametrize("others, share", [(["GPU-2", "GPU-1"], 500), (["GPU-2", "GPU-3"], 1000)])
def test_the_free_memory_of_a_gpu_is_shared_by_the_ranks_on_it(
    monkeypatch: pytest.MonkeyPatch, others: list[str], share: int
) -> None:
    """Each rank may see one GPU alone: all call theirs the first."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: mock.Mock(uuid="GPU-1"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    group = mock.Mock(device=torch.device("cuda", 0))
    group.communicator.all_gather_object = lambda own: [own, *((this_host(), gpu) for gpu in others)]
    assert free_memory(group) == share + 40


def write(root: Path, **files: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (root / name.replace("__", ".")).write_text(content + "\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    write(tmp_path / "proc", meminfo="MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    5000 kB")
    return tmp_path / "proc"


def test_available_memory_of_the_machine(proc: Path, tmp_path: Path) -> None:
    assert free_host_memory(proc, tmp_path / "cgroup") == 5000 * 1024


def test_control_groups_of_version_2_limit_what_is_free(proc: Path, tmp_path: Path) -> None:
    """The tightest of all groups above counts; caches that can be dropped do not."""
    root = tmp_path / "cgroup"
    write(proc / "self", cgroup="0::/outer/inner")
    write(root / "outer", memory__max="3000000", memory__current="1000000", memory__stat="anon 5\ninactive_file 200000")
    write(root / "outer" / "inner", memory__max="max", memory__current="900000", memory__stat="inactive_file 7")
    assert free_host_memory(proc, root) == 2_200_000
    write(root / "outer" / "inner", memory__max="1000000", memory__current="1900000")
    assert free_host_memory(proc, root) == 0


def test_control_groups_of_version_1_limit_what_is_free(proc: Path, tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    write(proc / "self", cgroup="3:cpu,cpuacct:/a\n2:memory:/a")
    write(
        root / "memory",
        memory__limit_in_bytes="4000000",
        memory__usage_in_bytes="1000000",
        memory__stat="total_inactive_file 50000",
    )
    assert free_host_memory(proc, root) == 3_050_000
