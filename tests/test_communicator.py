"""Collectives: right values in rank order, whatever the dtype, size, strides and evenness; inputs untouched."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tp.errors import CommunicationError, RequestError
from tp.parallel import CommunicationStatistics, TensorParallelGroup
from tp.parallel import group as group_module
from tp.parallel.communicator import MOST_CUDA_EVENTS, ONE_SHOT_BYTES, NativeCommunicator, sum_in_rank_order

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]


def _addend(rank, shape, dtype, device):
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(shape, generator=generator) * 10
    return values.to(dtype).to(device)


def _collectives(group, shape, dtype, sizes):
    """Every collective on strided inputs; returns results, and whether inputs stayed as they were."""
    communicator = group.communicator
    mine = _addend(group.rank, shape, dtype, group.device)
    strided = mine.t().contiguous().t() if mine.dim() == 2 else mine
    before = strided.clone()
    rows = _addend(group.rank, (sum(sizes), 3), dtype, group.device)
    results = (
        communicator.all_reduce(strided).cpu(),
        communicator.all_gather(rows[: sizes[group.rank]], sizes).cpu(),
        communicator.reduce_scatter(rows.t().contiguous().t(), sizes).cpu(),
        communicator.broadcast(strided, source=group.size - 1).cpu(),
    )
    return results, bool(torch.equal(strided, before))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("t", [1, 2, 3, 4])
def test_collectives_equal_the_sums_and_concatenations_of_one_process(ranks, t, dtype):
    sizes = [5, 0, 2, 4][:t]
    shapes = [(7, 5), (ONE_SHOT_BYTES // 4 // 5 + 3, 5)]  # one step, and two
    for shape in shapes:
        outcomes = ranks(t).run(_collectives, shape, dtype, sizes)
        addends = [_addend(rank, shape, dtype, "cpu") for rank in range(t)]
        rows = [_addend(rank, (sum(sizes), 3), dtype, "cpu") for rank in range(t)]
        for rank, ((reduced, gathered, scattered, broadcast), untouched) in enumerate(outcomes):
            assert untouched
            assert_sum(reduced, sum_in_rank_order(addends))
            assert torch.equal(gathered, torch.cat([rows[r][: sizes[r]] for r in range(t)]))
            assert_sum(scattered, sum_in_rank_order(rows).split(sizes)[rank])
            assert torch.equal(broadcast, addends[-1])


def assert_sum(actual, expected):
    """Bitwise where we own the sum; NCCL adds in an order of its own."""
    if torch.cuda.device_count() > 1:
        torch.testing.assert_close(actual, expected)
    else:
        assert torch.equal(actual, expected)


def _native_collectives(group):
    """Of `NativeCommunicator` over whatever backend there is; a warning is an error."""
    native, sizes = NativeCommunicator(group.process_group), [2, 0, 3]
    rows = torch.arange(10.0, device=group.device).view(5, 2) * (group.rank + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gathered = native.all_gather(rows[: sizes[group.rank]], sizes)
        return gathered.tolist(), native.reduce_scatter(rows, sizes).tolist()


def test_native_collectives_warn_of_nothing(ranks):
    rows = torch.arange(10.0).view(5, 2)
    expected = torch.cat([rows[:2], 3 * rows[:3]]).tolist()
    scattered = [part.tolist() for part in (6 * rows).split([2, 0, 3])]
    assert ranks(3).run(_native_collectives) == [(expected, part) for part in scattered]


def test_sums_accumulate_in_float32_and_round_once():
    ones = torch.full((3,), 1.0, dtype=torch.bfloat16)
    small = torch.full((3,), 2.0**-9, dtype=torch.bfloat16)  # below half an ulp of 1
    addends = [ones, small, small, small]
    assert torch.equal(sum_in_rank_order(addends), (ones.float() + 3 * small.float()).bfloat16())
    assert not torch.equal(sum_in_rank_order(addends), ones)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_bytes_of_floating_point_are_summed_too(dtype):
    addends = [torch.tensor([1.0, 0.25, -2.0]).to(dtype) for _ in range(5)]
    assert sum_in_rank_order(addends).float().tolist() == [5.0, 1.25, -10.0]


def _bfloat16_sum(group):
    value = torch.tensor([group.rank + 1.0], dtype=torch.bfloat16, device=group.device)
    return (
        group.communicator.all_reduce(value).tolist(),
        group.communicator.reduce_scatter(value.repeat(group.size), [1] * group.size).tolist(),
    )


def test_bfloat16_sum_of_one_and_two_is_three(ranks):
    assert ranks(2).run(_bfloat16_sum) == [([3.0], [3.0]), ([3.0], [3.0])]


def _count(group):
    group.communicator.statistics.reset()
    group.communicator.all_reduce(torch.ones(6, device=group.device))
    group.communicator.all_gather(torch.ones(2, 3, device=group.device), [2] * group.size)
    statistics = group.communicator.statistics
    return statistics.calls, statistics.bytes, statistics.seconds


def test_calls_and_bytes_and_time_are_counted(ranks):
    for calls, nbytes, seconds in ranks(3).run(_count):
        assert (calls, nbytes) == (2, 6 * 4 + 3 * 2 * 3 * 4)
        assert 0 < seconds < 5


class _Event:
    """A CUDA event that happened `at` milliseconds."""

    def __init__(self, at):
        self.at = at

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.at - self.at


def test_a_long_run_keeps_few_cuda_events_and_all_of_their_time():
    statistics = CommunicationStatistics()
    for _ in range(3 * MOST_CUDA_EVENTS):
        statistics.add_cuda_events(_Event(0.0), _Event(2.0))
    assert len(statistics._cuda_events) < MOST_CUDA_EVENTS
    assert statistics.seconds == pytest.approx(3 * MOST_CUDA_EVENTS * 2e-3)
    assert not statistics._cuda_events


def _wrong_rows(group):
    try:
        group.communicator.all_gather(torch.ones(2, 1), [3] * group.size)
    except CommunicationError as error:
        return str(error)


def test_sizes_that_contradict_the_tensor_are_refused_before_anything_is_sent(ranks):
    assert ranks(2).run(_wrong_rows)[1] == "all_gather on rank 1: tensor has 2 rows, sizes say 3"


def _one_rank_objects(group):
    def action():
        if group.rank in (1, 2):
            raise RequestError(f"bad file on {group.rank}")
        return group.rank

    try:
        group.agree(action)
    except RequestError as error:
        return str(error)


def test_an_error_of_one_rank_is_raised_on_all(ranks):
    assert ranks(3).run(_one_rank_objects) == ["bad file on 1"] * 3


def _agreed(group):
    return group.agree(lambda: group.rank * 10)


def test_without_errors_each_rank_has_its_own_result(ranks):
    assert ranks(3).run(_agreed) == [0, 10, 20]


def _from_mesh(group):
    mesh = dist.device_mesh.init_device_mesh(group.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    inner = TensorParallelGroup.from_device_mesh(mesh, "tp")
    value = torch.tensor([10.0 ** dist.get_rank()], device=inner.device)
    return inner.rank, inner.size, inner.communicator.all_reduce(value).item()


def test_groups_along_a_device_mesh_do_not_see_each_other(ranks):
    assert ranks(4).run(_from_mesh) == [(0, 2, 11.0), (1, 2, 11.0), (0, 2, 1100.0), (1, 2, 1100.0)]


def test_a_device_mesh_that_makes_its_own_process_group(tmp_path):
    """Such a group is made for several device types and names no single backend."""
    script = tmp_path / "mesh.py"
    script.write_text(
        "import torch\nfrom torch.distributed.device_mesh import init_device_mesh\n"
        "from tp.parallel import TensorParallelGroup\n"
        "group = TensorParallelGroup.from_device_mesh(init_device_mesh('cpu', (1,), mesh_dim_names=('tp',)))\n"
        "print(group.communicator.all_reduce(torch.ones(1)).item(), type(group.communicator).__name__)\n"
        "torch.distributed.destroy_process_group()\n"
    )
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = {**os.environ, **place, "PYTHONPATH": os.getcwd()}
    out = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60)
    assert out.stdout == "1.0 OrderedCommunicator\n", out.stderr


def test_a_group_of_one_needs_no_process_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    group = TensorParallelGroup.from_environment(device="cpu")
    assert (group.rank, group.size) == (0, 1)
    assert not dist.is_initialized()


def test_more_ranks_than_gpus_is_refused_before_nccl_starts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(CommunicationError, match="2 ranks on this host but 1 GPUs"):
        TensorParallelGroup.from_environment(backend="nccl", device="cuda")


def _gpus_compared(group, case, gpus):
    store = dist.PrefixStore(case, dist.distributed_c10d._get_default_store())
    try:
        group_module._check_gpus(store, group.rank, group.size, gpus[group.rank])
    except CommunicationError as error:
        return str(error)


def test_ranks_on_one_gpu_are_refused_on_all_ranks(ranks):
    assert ranks(3).run(_gpus_compared, "each its own", ["GPU-1", "GPU-2", "GPU-3"]) == [None] * 3
    messages = ranks(3).run(_gpus_compared, "two share one", ["GPU-1", "GPU-2", "GPU-1"])
    assert len(set(messages)) == 1
    assert messages[0].startswith("ranks 0, 2 are all on GPU GPU-1: NCCL takes one rank a GPU; ")


def test_a_rank_that_sees_one_gpu_alone_may_have_another_than_its_neighbours(monkeypatch):
    bound = mock.Mock()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", bound)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    for name, value in {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "3"}.items():
        monkeypatch.setenv(name, value)
    assert group_module._bind_device("cuda", "nccl") == torch.device("cuda", 0)
    bound.assert_called_once_with(torch.device("cuda", 0))


def test_the_device_is_bound_before_the_process_group_is_made(monkeypatch):
    order = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: order.append(("set_device", str(device))))
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: order.append(("init", a[0])))
    monkeypatch.setattr(
        TensorParallelGroup, "from_process_group", classmethod(lambda cls, world, device: cls.alone("cpu"))
    )
    monkeypatch.setattr(type(dist.group), "WORLD", property(lambda cls: object()))
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(group_module, "gpu_id", str)
    monkeypatch.setattr(group_module, "_check_gpus", lambda *arguments: order.append(("check", *arguments)))
    TensorParallelGroup.from_environment()
    assert order == [("set_device", "cuda:1"), ("init", "nccl"), ("check", None, 1, 2, "cuda:1")]
