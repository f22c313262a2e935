"""Makes one rank of a real command fail: where this directory is on PYTHONPATH, the interpreter imports it by itself.

FAULT="CAUSE,PHASE,RANK" says how, where and on which rank. A phase is a function of the program, wrapped once the
module that it is in has been imported, so that the command runs as it is up to that point. Every rank starts a process
of its own, and notes both in FAULT_DIRECTORY.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

INSIDE_S = 0.7
"""When a rank fails that waits in a collective; its peers come later than that."""

PLACES = {
    "start": ("launch.rank_process", "mute_unless_first", 1),
    "load": ("tp.checkpoint.loader", "Checkpoint._read", 1),
    "prefill": ("tp.generation.engine", "GenerationSession._run_model", 1),
    "decode": ("tp.generation.engine", "GenerationSession._run_model", 4),
    "decode collective": ("tp.generation.engine", "GenerationSession._run_model", 6),
    "forward": ("tp.training.train_step", "LossModule.forward", 2),
    "backward": ("tp.training.train_step", "LossModule.forward", 2),
    "save": ("tp.training.store", "write_model", 1),
    "training collective": ("tp.parallel.communicator", "Communicator.all_reduce", 9),
}
"""Phase: its module, function, and which of its calls."""


def note(name: str, content: object = "") -> None:
    path = os.path.join(os.environ["FAULT_DIRECTORY"], name)
    with open(f"{path}.unfinished", "w") as file:
        file.write(str(content))
    os.rename(f"{path}.unfinished", path)


def fail(cause: str) -> None:
    """Does what `cause` says; returns only after a process that was stopped goes on."""
    note("failed")
    if cause == "raise":
        raise ValueError("boom on purpose")
    if cause == "typed":
        from tp.errors import RequestError

        raise RequestError("refused on purpose")
    if cause == "memory":
        bytearray(1 << 60)
    if cause in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if cause == "kill" else signal.SIGSTOP)
    if cause == "absent":
        time.sleep(600)


def in_backward(cause: str, loss: Any) -> Any:
    loss.register_hook(lambda gradient: fail(cause))
    return loss


def fail_inside(cause: str) -> None:
    """`fail` a little later, when this thread waits for its peers."""
    if cause in ("kill", "stop"):
        threading.Timer(INSIDE_S, fail, [cause]).start()
    else:
        signal.signal(signal.SIGALRM, lambda number, frame: fail(cause))
        signal.setitimer(signal.ITIMER_REAL, INSIDE_S)


def wrapped(function: Callable[..., Any], call: int, cause: str, phase: str, own: bool) -> Callable[..., Any]:
    calls = 0

    @functools.wraps(function)
    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and phase.endswith("collective") and cause != "absent":
            if own:
                fail_inside(cause)
            else:
                time.sleep(2 * INSIDE_S)
        elif calls == call and own and phase == "backward":
            return in_backward(cause, function(*arguments, **options))
        elif calls == call and own:
            fail(cause)
        return function(*arguments, **options)

    return counted


class After(importlib.abc.MetaPathFinder):
    """Calls `change` with a module when it has been imported."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name = name
        self._change = change

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: Any) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def arrange(cause: str, phase: str, own: bool) -> None:
    if phase == "start" and own and cause in ("kill", "stop", "absent"):
        fail(cause)  # before the program has begun; what is raised here would go unnoticed
    module_name, function, call = PLACES[phase]
    *holder, name = function.split(".")

    def change(module: Any) -> None:
        target = functools.reduce(getattr, holder, module)
        setattr(target, name, wrapped(getattr(target, name), call, cause, phase, own))

    sys.meta_path.insert(0, After(module_name, change))


if "FAULT" in os.environ and "RANK" in os.environ:
    _cause, _phase, _rank = os.environ["FAULT"].split(",")
    _nowhere = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_WRONLY, 0) for stream in (1, 2)]
    _child = os.posix_spawnp("sleep", ["sleep", "600"], os.environ, file_actions=_nowhere)
    note(f"processes-{os.environ['RANK']}", f"{os.getpid()} {_child}")
    arrange(_cause, _phase, own=os.environ["RANK"] == _rank)
