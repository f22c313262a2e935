"""What a rank leaves behind when it fails, and which of several failures came first.

A rank that raises writes its error to the file that torch's elastic launcher names in TORCHELASTIC_ERROR_FILE, in
that launcher's format with an entry of our own, so that torchrun shows it too. Ranks of one machine see each
other's files. A rank that is killed leaves nothing but its exit status.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from tp.errors import LostPeerError, RankFailedError, TensorParallelError, first_line

ENTRY = "tp_decoder"
"""Key of our entry in an error file."""
_LOST_PEER_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError", "LostPeerError", "RankFailedError"}
_LOST_PEER_MESSAGES = ("gloo/transport", "NCCL error")
_OWN_FAULTS = ("ncclInvalidUsage", "ncclInvalidArgument", "ncclUnhandledCudaError", "ncclInternalError")
"""What NCCL says of the rank that it runs on."""

_PLACE_IN_SOURCE = re.compile(r"^\[\S+:\d+\] ")


@dataclass(frozen=True)
class Failure:
    """How one rank failed.

    Attributes:
        rank: global rank.
        message: the error in one or two lines; empty for a rank that left no record.
        trace: its formatted traceback.
        typed: it is one of ours, whose message is enough.
        lost_peer: it only says that another rank is gone.
        when: seconds since the epoch, of the record.
        exit_code: what a run that ends so should exit with.
        status: exit status of the process, -N for signal N; None while it runs.
    """

    rank: int
    message: str = ""
    trace: str = ""
    typed: bool = False
    lost_peer: bool = False
    when: float = 0.0
    exit_code: int = RankFailedError.exit_code
    status: int | None = None

    @classmethod
    def of(cls, rank: int, error: BaseException, within: Path | None = None) -> Failure:
        """The failure of a rank that raised; frames outside `within` that lead there are left out of the traceback."""
        error = _as_lost_peer(error) or error
        typed = isinstance(error, TensorParallelError) and not isinstance(error, RankFailedError)
        kind = type(error).__name__
        trace = traceback.format_exception(type(error), error, _trimmed(error.__traceback__, within))
        return cls(
            rank,
            message=str(error) if typed else f"{kind}: {_said_by(error)}".removesuffix(": "),
            trace="".join(trace),
            typed=typed,
            lost_peer=_is_lost_peer(error),
            when=time.time(),
            exit_code=error.exit_code if isinstance(error, TensorParallelError) else RankFailedError.exit_code,
        )

    @property
    def recorded(self) -> bool:
        return bool(self.message)

    @property
    def names_another(self) -> bool:
        """It says itself which rank is to blame: the other one."""
        return self.lost_peer and self.message.startswith("rank ")

    def write(self, path: Path) -> None:
        """Leaves the record, complete or not at all."""
        about = {"py_callstack": self.message if self.typed else self.trace, "timestamp": str(int(self.when))}
        content = {"message": {"message": self.message, "extraInfo": about}, ENTRY: asdict(self)}
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(content), encoding="utf-8")
        os.replace(unfinished, path)

    def story(self, world_size: int, *, together: bool, debug: bool) -> str:
        """What the user is told, the rank named last and once; not at all where all ranks raised this `together`."""
        if not self.recorded:
            return f"error: rank {self.rank} of {world_size} {_how_it_ended(self.status)}\n"
        named = f"rank {self.rank} of {world_size}"
        trace = self.trace if debug or not self.typed else ""
        if self.typed:
            bare = together or self.names_another
            return f"{trace}error: {self.message if bare else f'{named}: {self.message}'}\n"
        return f"{trace}error: {RankFailedError(f'{named} failed with {self.message.splitlines()[0]}')}\n"


def of_process(rank: int, status: int, error_file: Mapping[str, Any]) -> Failure:
    """The failure of a rank's process that has ended, from its exit status and the content of its error file."""
    if entry := error_file.get(ENTRY):
        return Failure(**{**entry, "status": status})
    message = error_file.get("message")
    if isinstance(message, dict):  # written by torch's own @record
        about = message.get("extraInfo", {})
        when = float(about.get("timestamp", 0))
        return Failure(rank, message["message"], about.get("py_callstack", ""), when=when, status=status)
    return Failure(rank, status=status)


def beside(error_file: Path) -> list[Failure]:
    """The records that ranks of this machine have left so far, this rank's own among them."""
    records = (json.loads(path.read_text(encoding="utf-8")) for path in error_file.parent.parent.glob("*/error.json"))
    return [Failure(**record[ENTRY]) for record in records if ENTRY in record]


def first(failures: Sequence[Failure]) -> Failure:
    """The failure that caused the others.

    An error with a cause of its own comes before a death, and a death before errors that only speak of lost peers.

    Args:
        failures: in the order in which they were noticed, without the ranks that the launcher ended.
    """

    def order(item: tuple[int, Failure]) -> tuple[int, float]:
        index, failure = item
        if failure.recorded:
            return (2 if failure.lost_peer else 0), failure.when
        return 1, index

    return min(enumerate(failures), key=order)[1]


def blamed_on(cause: Failure, absent: Collection[int]) -> Failure:
    """What to tell of a `cause` that only speaks of a lost peer, and does not know which.

    Args:
        absent: ranks that ran on until the launcher ended them, where all others have failed. If it is one, the others
            waited for that one.
    """
    if not cause.lost_peer or cause.names_another or len(absent) != 1:
        return cause
    (rank,) = absent
    return replace(cause, rank=rank, message=f"did not come to a collective of the others: {cause.message}")


def all_alike(failures: Iterable[Failure], world_size: int) -> bool:
    """Whether every rank raised the same typed error."""
    recorded = [failure for failure in failures if failure.recorded]
    return len(recorded) == world_size and all(f.typed and f.message == recorded[0].message for f in recorded)


def _as_lost_peer(error: BaseException) -> LostPeerError | None:
    """What torch raises in a collective whose peer is gone, as our error, with its traceback; None for all else."""
    if isinstance(error, TensorParallelError) or not _speaks_of_lost_peer(error):
        return None
    reason = _PLACE_IN_SOURCE.sub("", first_line(error)).partition(". This is typically")[0]
    typed = LostPeerError(f"the connection to another rank is lost, or it does not answer: {reason}")
    typed.__cause__ = error
    return typed.with_traceback(error.__traceback__)


def _is_lost_peer(error: BaseException | None) -> bool:
    seen = 0
    while error is not None and seen < 20:
        if _speaks_of_lost_peer(error):
            return True
        error = error.__cause__ or error.__context__
        seen += 1
    return False


def _speaks_of_lost_peer(error: BaseException) -> bool:
    """A collective failed for it; not a download, nor anything else that a script does over a connection."""
    said = _said_by(error)
    if isinstance(error, OSError) or any(fault in said for fault in _OWN_FAULTS):
        return False
    return type(error).__name__ in _LOST_PEER_TYPES or any(text in said for text in _LOST_PEER_MESSAGES)


def _said_by(error: BaseException) -> str:
    """An error of a user's script may fail to say anything."""
    try:
        return str(error)
    except Exception:
        return "its text cannot be made"


def _trimmed(trace: TracebackType | None, within: Path | None) -> TracebackType | None:
    start = trace
    while within is not None and start is not None:
        if Path(start.tb_frame.f_code.co_filename).is_relative_to(within):
            return start
        start = start.tb_next
    return trace


def _how_it_ended(status: int | None) -> str:
    if status is None or status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
