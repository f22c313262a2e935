"""Starting ranks with torch's elastic launcher, and saying what became of them."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
import uuid
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch import ROOT, addresses, failures
from launch.addresses import Endpoint
from launch.elastic import RanksHere, when_closing, when_started
from launch.failures import Failure
from launch.forwarded_sigterm import ForwardedSigterm
from launch.process_guard import MARK, ProcessGuard
from launch.rank_process import LAUNCHER
from tp.cores import own_cores
from tp.errors import CommunicationError, RequestError, first_line

STANDARD_INPUT = "TP_DECODER_STANDARD_INPUT"
"""Environment variable: the file that holds what the launcher read from its standard input."""
MONITOR_INTERVAL_S = 0.05
LOG_TAIL_BYTES = 2000
FILES, FILES_A_RANK = 24, 4
"""Open files, at least: two ranks run with 32 and do not start with 24."""


@dataclass(frozen=True)
class Placement:
    """How many ranks run here, and which other machines take part.

    Attributes:
        ranks_here: ranks on this machine; the same number on all of them.
        nodes, node_rank, rdzv_backend, rdzv_endpoint, rdzv_id, local_addr: torchrun's options of the same names.
    """

    ranks_here: int
    nodes: int = 1
    node_rank: int | None = None
    rdzv_backend: str = "c10d"
    rdzv_endpoint: str = ""
    rdzv_id: str = ""
    local_addr: str | None = None

    @classmethod
    def of(cls, ranks_here: int, arguments: Namespace) -> Placement:
        """From a command's options, see `launch.arguments.add_rendezvous_options`."""
        return cls(
            ranks_here,
            arguments.nnodes,
            arguments.node_rank,
            arguments.rdzv_backend,
            arguments.rdzv_endpoint,
            arguments.rdzv_id,
            arguments.local_addr,
        )

    @property
    def world_size(self) -> int:
        return self.ranks_here * self.nodes

    def own_address(self) -> str:
        """Where the ranks of other machines reach those of this one.

        Raises:
            CommunicationError, RequestError: see `launch.addresses.own_address`.
        """
        if self.local_addr is not None:
            return self.local_addr
        if self.nodes == 1:
            return "127.0.0.1"
        return addresses.own_address(Endpoint.of(self.rdzv_endpoint))


def start(
    command: Sequence[str],
    placement: Placement,
    *,
    debug: bool = False,
    standard_input: str = "",
    grace_s: float | None = None,
) -> int:
    """Runs `python command` once a rank, waits for all, and returns the exit status of the run.

    If a rank raises or dies, the others are ended within seconds, and the first one's failure is told on stderr.

    Args:
        command: arguments of the interpreter.
        debug: leaves the launcher's and the libraries' own messages on.
        standard_input: text that rank 0 finds in the file named by `STANDARD_INPUT`.
        grace_s: seconds that SIGTERM leaves ranks which listen to it and end by themselves; if all do with status 0,
            so does the run. By default SIGTERM ends them, and the run with 128 + 15. A second SIGTERM always does.
    """
    _check_open_files(placement)
    if placement.local_addr is not None:
        addresses.check_own(placement.local_addr)
    placement = replace(placement, local_addr=placement.own_address())
    directory = _temporary_directory()
    with _guard(directory) as guard:
        # torch reads some of these when it is imported, so that they come first; the ranks inherit them.
        os.environ.update({**_environment(placement, debug), MARK: str(directory)})
        if standard_input:
            os.environ[STANDARD_INPUT] = str(_file_of(standard_input, directory))
        status = _launch(command, placement, directory, guard, debug, grace_s)
        if status == 0:
            guard.release()  # what ranks that ended well have left running is theirs
        return status


def own_command(argv: Sequence[str]) -> list[str]:
    """The interpreter's arguments that run this program, whatever lies in the directory that it is run in."""
    quiet = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL)"  # no traceback of the imports
    code = f"{quiet}; sys.path[0] = {str(ROOT)!r}; from launch.__main__ import main; sys.exit(main())"
    return ["-c", code, *argv]


def threads_a_rank(ranks_here: int) -> int:
    """Cores that this process may use, dealt out to its ranks; at least one each."""
    return max(1, len(own_cores()) // ranks_here)


def _environment(placement: Placement, debug: bool) -> Mapping[str, str]:
    """What ranks find in their environment; what the user has set stays."""
    settings = {"OMP_NUM_THREADS": str(threads_a_rank(placement.ranks_here))}
    if interface := addresses.interface_of(placement.own_address()):
        settings["GLOO_SOCKET_IFNAME"] = interface
    if not debug:
        settings["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    return {**settings, **os.environ, LAUNCHER: str(os.getpid())}


def _check_open_files(placement: Placement) -> None:
    """With too few, torch waits without end for its own store, or fails in the middle of starting."""
    needed = FILES + FILES_A_RANK * placement.ranks_here
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < needed:
        raise RequestError(f"ulimit -n is {limit}: {placement.ranks_here} ranks need {needed} open files, raise it")


def _temporary_directory() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="tp-decoder-"))
    except OSError as error:
        raise RequestError(f"no temporary directory can be made ({error.strerror}): TMPDIR names another") from error


def _guard(directory: Path) -> ProcessGuard:
    try:
        return ProcessGuard(directory)
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise RequestError(
            f"no further process can be started ({error.strerror}): end others, or raise ulimit -u"
        ) from error


def _file_of(text: str, directory: Path) -> Path:
    path = directory / "standard-input"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(
            f"standard input cannot be kept in {path}: {error.strerror}; TMPDIR names another"
        ) from error
    return path


def _launch(
    command: Sequence[str],
    placement: Placement,
    directory: Path,
    guard: ProcessGuard,
    debug: bool,
    grace_s: float | None,
) -> int:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    if not debug:
        logging.disable(logging.CRITICAL)  # nothing but the elastic launcher logs in this process
    request = None if grace_s is None else ForwardedSigterm(grace_s)
    ranks = RanksHere(guard)
    try:
        with when_started(ranks.started), when_closing(ranks.closing), _listening(request):
            elastic_launch(_config(placement, directory), sys.executable)(*command)
    except ChildFailedError as error:
        noticed = [
            failures.of_process(rank, failed.exitcode, failed.error_file_data)
            for rank, failed in error.failures.items()
        ]
        if request and request.sent and all(failure.status == -signal.SIGTERM for failure in noticed):
            return 128 + signal.SIGTERM  # they had not begun to listen
        absent = ranks.asked_to_end - {failure.rank for failure in noticed if failure.recorded}
        own = [failure for failure in noticed if failure.rank not in absent]
        return _tell(own, absent, placement, directory, debug)
    except (RendezvousError, DistError) as error:
        meeting = placement.rdzv_endpoint or "a port of this machine"
        reason = first_line(error.__cause__ or error)
        raise CommunicationError(f"{placement.nodes} machines could not meet at {meeting}: {reason}") from error
    except SignalException as error:
        return 128 + int(error.sigval)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        ranks.over.set()
    return 0


def _config(placement: Placement, directory: Path) -> Any:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    settings = {} if placement.node_rank is None else {"rank": placement.node_rank}
    return LaunchConfig(
        min_nodes=placement.nodes,
        max_nodes=placement.nodes,
        nproc_per_node=placement.ranks_here,
        run_id=placement.rdzv_id or ("none" if placement.nodes > 1 else uuid.uuid4().hex),
        rdzv_backend=_rendezvous(placement),
        rdzv_endpoint=placement.rdzv_endpoint if placement.nodes > 1 else "127.0.0.1:0",
        rdzv_configs=settings,
        local_addr=placement.own_address(),
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL_S,
        logs_specs=DefaultLogsSpecs(log_dir=str(directory)),
    )


def _rendezvous(placement: Placement) -> str:
    """The name of torch's rendezvous that the machines meet by."""
    if placement.nodes == 1:
        return "c10d"
    if placement.rdzv_backend != "c10d":
        return placement.rdzv_backend
    from launch.rendezvous import registered

    return registered()


def _listening(request: ForwardedSigterm | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if request is None else request.listening()


def _tell(noticed: Sequence[Failure], absent: set[int], placement: Placement, directory: Path, debug: bool) -> int:
    cause = failures.first(noticed)
    others_failed = len(noticed) + len(absent) == placement.ranks_here
    if placement.nodes == 1 and others_failed:
        cause = failures.blamed_on(cause, absent)
    together = failures.all_alike(noticed, placement.ranks_here)
    if not cause.recorded:
        sys.stderr.write(_log_tail(directory, cause.rank % placement.ranks_here))
    sys.stderr.write(cause.story(placement.world_size, together=together, debug=debug))
    return cause.exit_code


def _log_tail(directory: Path, local_rank: int) -> str:
    """The last lines that a rank, or the interpreter as it crashed, printed past the terminal."""
    for path in directory.glob(f"*/attempt_0/{local_rank}/output.log"):
        tail = path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        return tail if not tail or tail.endswith("\n") else tail + "\n"
    return ""
