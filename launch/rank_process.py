"""A rank, started by our launcher or by torchrun: what it may print, and how it ends when it fails."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from launch import failures, heartbeat
from launch.failures import Failure
from launch.terminal import Terminal, redirect
from tp.errors import CommunicationError

LAUNCHER = "TP_DECODER_LAUNCHER"
"""Environment variable: process id of our launcher, which tells the user what became of the ranks."""
BYSTANDER_PATIENCE_S = 1.0
"""How long a rank that lost a peer waits to be ended, so that the launcher notices the culprit first."""
TYPED_PATIENCE_S = 4.0
"""How long a rank with a typed error waits for the others to raise it too; on a busy machine some start late."""


def is_rank() -> bool:
    """Whether a launcher started this process as one of several ranks, or as the only one.

    Raises:
        CommunicationError: the launcher's variables are no numbers, or contradict each other.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return False
    rank, size, _ = own_rank(), world_size(), _ranks_here()
    if not 0 <= rank < size:
        raise CommunicationError(f"RANK={rank} in the environment is outside 0..{size - 1} (WORLD_SIZE={size})")
    return True


def own_rank() -> int:
    """This process's rank; 0 where no launcher gave it one."""
    return _number("RANK", 0)


def world_size() -> int:
    """How many ranks this process's launcher started, on all machines."""
    return _number("WORLD_SIZE", 1)


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    try:
        return int(text)
    except ValueError:
        raise CommunicationError(
            f"{variable}={text!r} in the environment is no number: start with torchrun, which sets it, or unset it"
        ) from None


def as_rank(action: Callable[[], int], *, debug: bool = False, script_directory: Path | None = None) -> int:
    """Runs a rank's work. If it raises, the process leaves its record and ends here, at once.

    Args:
        action: the work; its result is the exit status.
        debug: typed errors are shown with their tracebacks.
        script_directory: where tracebacks of a user's script begin.
    """
    launcher = os.environ.pop(LAUNCHER, None)  # processes that this rank starts are not the launcher's
    rank, error_file = own_rank(), _error_file()  # before a script changes its environment
    if launcher is not None:
        _die_with(int(launcher))
        if error_file is not None:
            heartbeat.begin(error_file)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        _die_with(os.getppid())
    faulthandler.enable()
    users_stderr = os.dup(2)
    try:
        return action()
    except SystemExit:
        raise
    except BaseException as error:
        failure = Failure.of(rank, error, script_directory)
    _fail(failure, error_file, users_stderr, debug, tells=launcher is None)


def leave(status: int) -> NoReturn:
    """Ends a rank that has done its work, without finalising the interpreter: a thread of gloo that is not quite
    done yet may abort the process there.
    """
    _flush()
    os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def end_at_once(message: str, status: int) -> NoReturn:
    """Ends this process from any of its threads: a typed failure, told by the launcher if it is ours."""
    path = _error_file()
    if path is None:
        os.write(2, f"error: {message}\n".encode())
    else:
        failure = Failure(own_rank(), message, typed=True, when=time.time(), exit_code=status)
        with contextlib.suppress(OSError):
            failure.write(path)
    os._exit(status)


def mute_unless_first(debug: bool) -> None:
    """Only rank 0 speaks: what other ranks print goes to a log beside their error file. With `debug`, all speak."""
    if own_rank() != 0 and not debug:
        for stream in (1, 2):
            redirect(_log(), stream)


def rank_terminal(debug: bool) -> Terminal:
    """This rank's terminal. On rank 0, what libraries print goes to the log too; with `debug` to stderr."""
    return Terminal.apart_from_libraries(None if debug else _log()) if own_rank() == 0 else Terminal.silent()


def _fail(failure: Failure, path: Path | None, users_stderr: int, debug: bool, *, tells: bool) -> NoReturn:
    """Ends the process. No destructors: those of process groups may wait for peers that are themselves stuck.

    Args:
        path: of the rank's record, where a launcher looks for one.
        users_stderr: where to tell what happened if this failure came first.
        tells: it is not our launcher, which tells it from the record. Without a record, on a full disk, it cannot.
    """
    try:
        if path is not None:
            failure.write(path)
    except OSError:
        tells = True
    noticed = _wait_for_others(failure, path)
    if tells and failures.first(noticed).rank == failure.rank:
        together = failures.all_alike(noticed, _ranks_here())
        with contextlib.suppress(OSError):
            story = failure.story(world_size(), together=together, debug=debug)
            os.write(users_stderr, story.encode(errors="backslashreplace"))  # a path may hold bytes that are no text
    _flush()
    os._exit(failure.exit_code)


def _wait_for_others(failure: Failure, path: Path | None) -> list[Failure]:
    """The records of this machine's ranks, once it is clear whose failure this is.

    An error with a cause of its own is clear at once.
    """
    patience = BYSTANDER_PATIENCE_S if failure.lost_peer else TYPED_PATIENCE_S if failure.typed else 0.0
    deadline = time.monotonic() + patience
    while path is not None:
        noticed = failures.beside(path)
        if len(noticed) == _ranks_here() or time.monotonic() >= deadline:
            return noticed or [failure]
        time.sleep(0.02)
    return [failure]


def _error_file() -> Path | None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path) if path else None


def _log() -> Path:
    path = _error_file()
    return path.with_name("output.log") if path else Path(os.devnull)


def _ranks_here() -> int:
    return _number("LOCAL_WORLD_SIZE", world_size())


def _die_with(launcher: int) -> None:
    """Has Linux kill this rank when our launcher is gone, however it went, even while this rank waits for a peer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
    try:
        os.kill(launcher, 0)
    except ProcessLookupError:  # it went before that
        os._exit(128 + signal.SIGTERM)
