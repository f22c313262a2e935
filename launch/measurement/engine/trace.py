"""Chrome traces of what a rank does in a prefill, in decode steps, or in a training step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from launch.measurement.engine.regions import named_function, named_regions
from launch.measurement.engine.requests import TraceRequest, TrainingRequest
from launch.measurement.engine.serving import begin, switched_off
from launch.measurement.engine.training import train
from launch.measurement.requests import DecodeRequest

if TYPE_CHECKING:
    from tp.generation import LanguageModel
    from tp.models import CausalLM
    from tp.training.train_step import Learner


def trace_serving(model: LanguageModel, request: TraceRequest) -> str:
    """Traces a request on every rank; gives the path of this rank's file.

    Decode steps run without what replays them: a replay has no Python that could name its parts.
    """
    from tp.generation.decode_graphs import NAME

    traced = request.request
    assert isinstance(traced, DecodeRequest)
    path = _path(request, model.group.rank)
    with switched_off(NAME), named_regions(model):
        stream = begin(model, traced)
        if traced.new_tokens > 1:
            waiting = set(range(traced.batch))
            while waiting:
                waiting.discard(next(stream).index)
        with _profiled(path, model):
            for _ in stream:
                pass
    return str(path)


def trace_training(learner: Learner, request: TraceRequest) -> str:
    """Traces a step on every rank; gives the path of this rank's file."""
    from tp.training import loss_module

    assert isinstance(request.request, TrainingRequest)
    path = _path(request, learner.model.group.rank)
    loss = named_function(loss_module, "chunked_head_cross_entropy", lambda *_: "lm_head and loss")
    with named_regions(learner.model), loss, _profiled(path, learner.model):
        train(learner, request.request)
    return str(path)


def _path(request: TraceRequest, rank: int) -> Path:
    return Path(request.directory) / f"{request.name}-rank-{rank}.json"


@contextlib.contextmanager
def _profiled(path: Path, model: CausalLM) -> Iterator[None]:
    from torch.profiler import ProfilerActivity, profile

    on_cuda = model.group.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_cuda else [])
    with profile(activities=activities) as profiler:
        yield
        if on_cuda:
            torch.cuda.synchronize(model.group.device)
    profiler.export_chrome_trace(str(path))
