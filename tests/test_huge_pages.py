"""Weights in one block: right shapes, ties kept, and huge pages where the system gives them."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tp.huge_pages import HUGE_PAGE_BYTES, Block, give_back, materialise


def test_parameters_lie_in_one_block_and_stay_tied() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 5, device="meta"), "b": nn.Linear(3, 5, bias=False, device="meta")})
    model["b"].weight = model["a"].weight
    model["a"].bias.requires_grad_(False)
    materialise(model, torch.device("cpu"))
    a, b = model["a"], model["b"]
    assert a.weight is b.weight
    assert (a.weight.shape, a.bias.shape) == ((5, 3), (5,))
    assert a.weight.requires_grad and not a.bias.requires_grad
    assert a.weight.data_ptr() % 64 == a.bias.data_ptr() % 64 == 0
    a.weight.data.fill_(1.0)
    a.bias.data.fill_(2.0)
    assert (a.weight == 1).all() and (a.bias == 2).all()
    torch.testing.assert_close(a(torch.ones(1, 3)), torch.full((1, 5), 5.0))


def test_a_block_outlives_its_maker() -> None:
    shape = torch.Size((1000, 300))
    first, second = (lambda block: (block.empty(shape, torch.bfloat16), block.empty(shape, torch.int8)))(Block(10**6))
    first.fill_(3), second.fill_(4)
    assert (first == 3).all() and (second == 4).all()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_what_is_given_back_is_free_though_its_block_lives() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    size = 64 * 2**20
    block = Block(2 * size)
    kept, given = (block.empty(torch.Size((size,)), torch.uint8).fill_(7) for _ in range(2))
    before = resident()
    give_back(given)
    assert before - resident() > 0.9 * size
    assert (kept == 7).all()


def test_what_has_its_memory_alone_is_left_to_whoever_holds_it() -> None:
    tensor = torch.ones(2**18)
    give_back(tensor)
    assert (tensor == 1).all()


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()
    or "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(),
    reason="this system gives no huge pages",
)
def test_a_large_block_is_in_huge_pages() -> None:
    tensor = Block(16 * HUGE_PAGE_BYTES).empty(torch.Size((16, HUGE_PAGE_BYTES)), torch.uint8).fill_(1)
    address = tensor.data_ptr()
    for region in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, stop = (int(number, 16) for number in region.split(maxsplit=1)[0].split("-"))
        if start <= address < stop:
            assert int(re.search(r"AnonHugePages:\s+(\d+) kB", region)[1]) * 1024 >= 8 * HUGE_PAGE_BYTES
            return
    raise AssertionError("the block is in no region")
