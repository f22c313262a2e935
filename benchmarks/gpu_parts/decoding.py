"""Prefill and decode of random models of known shapes, with CUDA graphs and without."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_parts.machine import Machine
from benchmarks.gpu_parts.record import Record, require
from launch.measurement.copy_bandwidth import copy_bandwidth
from tp.config import ModelConfig
from tp.generation.decode_graphs import DecodeGraphs
from tp.layers import KVCache, SequenceSlice, ShardedLogits, Step
from tp.models import CausalLM
from tp.parallel import TensorParallelGroup

WARM_UPS = 3
"""Steps that do not count: the second of a size is where it is captured."""
PROFILED_STEPS = 4
LONGEST_KERNELS = 12
NextLogits = Callable[[Step], ShardedLogits]


@torch.no_grad()
def run(record: Record, machine: Machine) -> None:
    """A model after the other; tokens/s, and the bytes that a token must read against the copy bandwidth."""
    copied = copy_bandwidth(machine.device).median if machine.compiles else float("inf")
    for name, config in machine.models.items():
        measure_model(record, machine, name, config, copied)


def measure_model(record: Record, machine: Machine, name: str, config: ModelConfig, copied_per_second: float) -> None:
    """Prefill, then decode after it; nothing of the model is held afterwards, whatever fails."""
    with record.attempt(f"{name} prefill of {machine.prefill}") as found:
        if machine.compiles:
            torch.cuda.empty_cache()  # what the model before had
        model, cache = random_model(config, machine)
        found["milliseconds"] = prefill_milliseconds(model, cache, machine)
        found["tokens_per_s"] = machine.prefill / found["milliseconds"] * 1e3
        for slot in range(max(machine.batches)):
            model.next_token_logits(prompt_step(model, machine.prompt, slot), cache)
    if "tokens_per_s" in found:
        measure_decode(record, machine, name, model, cache, copied_per_second)


def random_model(config: ModelConfig, machine: Machine) -> tuple[CausalLM, KVCache]:
    """With a cache that holds every batch, a prefill, and what is decoded after it."""
    group = TensorParallelGroup.alone(machine.device)
    model = CausalLM(config, group, dtype=machine.dtype, device=machine.device)
    fill(model)
    capacity = machine.prefill + machine.new_tokens + WARM_UPS + 1
    return model, KVCache(config, group, max(machine.batches), capacity, dtype=machine.dtype, device=machine.device)


def fill(model: nn.Module) -> None:
    """Matrices from N(0, 0.02²), biases too, norm weights 1: drawn on the device."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1)
        else:
            parameter.normal_(0, 0.02)


def prefill_milliseconds(model: CausalLM, cache: KVCache, machine: Machine) -> float:
    """The median of runs of one prompt, until its next token is known on the host."""
    times = []
    for _ in range(1 + min(5, machine.runs)):
        began = time.perf_counter()
        model.next_token_logits(prompt_step(model, machine.prefill, 0), cache).local.argmax(-1).tolist()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:]) * 1e3


def prompt_step(model: CausalLM, length: int, slot: int) -> Step:
    """Random tokens of one sequence."""
    token_ids = torch.randint(model.config.vocab_size, (length,), device=model.group.device)
    return Step(token_ids, (SequenceSlice(length, 0, slot),))


def measure_decode(
    record: Record, machine: Machine, name: str, model: CausalLM, cache: KVCache, copied_per_second: float
) -> None:
    """Plain steps and captured ones after the prompts, at every batch size, and what a captured step is made of."""
    graphs = DecodeGraphs(model, cache, machine.capture)
    forms: dict[str, NextLogits] = {
        "plain": lambda step: model.next_token_logits(step, cache), "captured": graphs.next_token_logits
    }  # fmt: skip
    for batch in machine.batches:
        for form, next_logits in forms.items():
            with record.attempt(f"{name} decode, batch {batch}, {form}") as found:
                seconds = seconds_a_step(next_logits, batch, machine)
                found["milliseconds"] = seconds * 1e3
                found["tokens_per_s"] = batch / seconds
                found["bytes_read"] = bytes_read(model, cache, batch, machine)
                found["share_of_copy_bandwidth"] = found["bytes_read"] / seconds / copied_per_second
                require(form == "plain" or batch in graphs._captured, "the step was not captured: see the warning")
    with record.attempt(f"{name} decode, batch 1, kernels") as found:
        found["microseconds_a_step"] = kernel_microseconds(forms["captured"], machine)


def seconds_a_step(next_logits: NextLogits, batch: int, machine: Machine) -> float:
    """Greedy decode after the prompt, with each step's tokens read on the host, as generation does."""
    slots = torch.arange(batch, device=machine.device)
    starts = torch.full_like(slots, machine.prompt)
    token_ids = torch.zeros_like(slots)
    began = 0.0
    for number in range(WARM_UPS + machine.new_tokens):
        if number == WARM_UPS:
            machine.synchronize()
            began = time.perf_counter()
        token_ids = next_logits(Step.of_decode(token_ids, slots, starts)).local.argmax(-1)
        token_ids.tolist()
        starts = starts + 1
    return (time.perf_counter() - began) / machine.new_tokens


def bytes_read(model: CausalLM, cache: KVCache, batch: int, machine: Machine) -> int:
    """Of weights and cached tokens by one step, on average."""
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if not model.config.tie_word_embeddings:
        weights -= model.model.embed_tokens.weight.nbytes
    tokens = machine.prompt + WARM_UPS + machine.new_tokens // 2
    return weights + cache.nbytes // (cache.num_slots * cache.capacity) * batch * tokens


def kernel_microseconds(next_logits: NextLogits, machine: Machine) -> dict[str, Any]:
    """The kernels that take the most time in a step, and all together, by torch's profiler."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if machine.compiles else [])]
    slots = torch.zeros(1, dtype=torch.int64, device=machine.device)
    step = Step.of_decode(torch.zeros_like(slots), slots, torch.full_like(slots, machine.prompt))
    with profile(activities=activities) as profiled:
        for _ in range(PROFILED_STEPS):
            next_logits(step)
        machine.synchronize()
    times = {
        event.key[:80]: event.self_device_time_total / PROFILED_STEPS
        for event in profiled.key_averages()
        if event.device_type != DeviceType.CPU
    }
    longest = sorted(times.items(), key=lambda item: -item[1])[:LONGEST_KERNELS]
    return {"all": sum(times.values()), **dict(longest)}
