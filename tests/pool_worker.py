"""What a process of the pool does: takes its place in a world of ranks, and answers calls; see `pool`."""

from __future__ import annotations

import faulthandler
import importlib
import io
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tp.parallel import TensorParallelGroup

SMALL_SET = 4
"""Workers of the set that serves every degree up to this; a larger degree gets a set of its own."""
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True)
class Outcome:
    """What one rank reported: a result, or an error and its formatted traceback, and when (system-wide clock)."""

    when: float
    result: Any = None
    error: BaseException | None = None
    trace: str = ""


def serve(pipe: Connection, rank: int, count: int, directory: str) -> None:
    """A worker: answers calls until the session closes the pipe."""
    threading.Thread(target=_die_with_session, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    torch.set_num_threads(1)
    _rewrite_asserts()
    world = _World(rank, count, directory)
    environment = dict(os.environ)
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        os.environ.clear()
        os.environ.update(environment)
        pipe.send_bytes(dumps(_answer(world, request)))


def _answer(world: _World, request: bytes) -> Outcome:
    try:
        tp_size, module, name, args, kwargs = pickle.loads(request)
        function = importlib.import_module(module)
        for attribute in name.split("."):
            function = getattr(function, attribute)
        group = world.group(tp_size)
        _reset_state()
        result = function(group, *args, **kwargs)
        return Outcome(time.monotonic(), _sendable(result, "result"))
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        return Outcome(time.monotonic(), error=_sendable_error(error), trace=trace)


class _World:
    """This worker's place among the others, and the process groups of every size that its set serves."""

    def __init__(self, rank: int, count: int, directory: str) -> None:
        store = dist.FileStore(os.path.join(directory, "store"), count)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
        gpus = torch.cuda.device_count()
        self.device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
        if gpus:
            torch.cuda.set_device(self.device)
        self._process_groups = {
            size: dist.new_group(
                list(range(size)),
                backend="nccl" if gpus >= size else "gloo",
                timeout=timedelta(seconds=600),  # the pool's own timeouts come first
            )
            for size in (range(2, count + 1) if count == SMALL_SET else [count])
        }

    def group(self, tp_size: int) -> TensorParallelGroup:
        """A new object each time, so that statistics start at zero, over process groups that are kept."""
        if tp_size == 1:
            return TensorParallelGroup.alone(self.device)
        return TensorParallelGroup.from_process_group(self._process_groups[tp_size], self.device)


def _reset_state() -> None:
    random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)


def _die_with_session() -> None:
    """Ends this worker when the session is gone, also while it waits in a collective."""
    session = multiprocessing.parent_process()
    assert session is not None
    session.join()
    os._exit(1)


def _rewrite_asserts() -> None:
    """Gives asserts in functions of test modules pytest's messages, with the values compared."""
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    install_importhook(get_config())


class _ByValue(pickle.Pickler):
    """Tensors travel as copies of their own elements, not of the storage that they are a view of."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            own = obj.detach().cpu()
            return (own if own.untyped_storage().nbytes() == own.nbytes else own.clone()).__reduce_ex__(4)
        return NotImplemented


def dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _ByValue(buffer).dump(value)
    return buffer.getvalue()


def _sendable(value: Any, what: str) -> Any:
    try:
        dumps(value)
    except Exception as error:
        raise TypeError(f"the {what} of a rank cannot be sent: {error}") from error
    return value


def _sendable_error(error: BaseException) -> BaseException:
    try:
        assert type(pickle.loads(dumps(error))) is type(error)
    except BaseException:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
