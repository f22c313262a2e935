"""Which of several failures is told as the first, and how."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from launch import failures
from launch.failures import Failure
from tp.errors import CheckpointError, CommunicationError, LostPeerError, RankFailedError


def raised(rank: int, error: BaseException, when: float = 0.0) -> Failure:
    failure = Failure.of(rank, error)
    return Failure(**{**vars(failure), "when": when or failure.when})


def lost_peer() -> RuntimeError:
    return RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")


def wrapped(error: BaseException) -> BaseException:
    try:
        try:
            raise error
        except RuntimeError as caught:
            raise ValueError("step 3 failed") from caught
    except ValueError as outer:
        return outer


@pytest.mark.parametrize(
    "noticed, expected",
    [
        ([raised(0, ValueError("late"), 2.0), raised(1, ValueError("early"), 1.0)], 1),
        ([raised(0, lost_peer(), 1.0), raised(1, ValueError("cause"), 2.0)], 1),
        ([raised(0, wrapped(lost_peer()), 1.0), Failure(2, status=-signal.SIGKILL)], 2),
        ([raised(0, RankFailedError("rank 1 raised"), 1.0), raised(1, ValueError("cause"), 2.0)], 1),
        ([raised(0, lost_peer(), 2.0), raised(1, lost_peer(), 1.0)], 1),
        ([raised(0, LostPeerError("rank 1 ended"), 1.0), Failure(1, status=-signal.SIGKILL)], 1),
        ([raised(0, LostPeerError("rank 1 ended"), 1.0), raised(1, CommunicationError("cause"), 2.0)], 1),
        ([Failure(1, status=-signal.SIGKILL), Failure(0, status=-signal.SIGTERM)], 1),
        ([Failure(2, status=-signal.SIGTERM), Failure(0, status=-signal.SIGTERM)], 2),
        ([Failure(0, status=3), Failure(1, status=-signal.SIGTERM)], 0),
        ([raised(1, ValueError("cause")), Failure(0, status=-signal.SIGKILL)], 1),
    ],
)
def test_the_first_failure(noticed: list[Failure], expected: int) -> None:
    assert failures.first(noticed).rank == expected


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(104, "Connection reset by peer"),
        type("ReadError", (Exception,), {})("[Errno 104] Connection reset by peer"),
        OSError("gloo/transport"),
        *(
            type("DistBackendError", (RuntimeError,), {})(
                f"NCCL error in: ProcessGroupNCCL.cpp:1, {fault}: Last error:"
            )
            for fault in ("ncclInvalidUsage", "ncclInvalidArgument", "ncclUnhandledCudaError", "ncclInternalError")
        ),
    ],
    ids=str,
)
def test_what_a_rank_does_wrong_by_itself_is_no_lost_peer(error: Exception) -> None:
    """A download of a script, or a fault of NCCL's on this very rank: told with its traceback."""
    failure = raised(0, error)
    assert not failure.typed and not failure.lost_peer
    remote = type("DistBackendError", (RuntimeError,), {})("NCCL error in: x, ncclRemoteError: remote process exited")
    assert raised(0, remote).lost_peer


def test_an_error_that_fails_to_say_anything_is_told_by_its_type() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("x")

    story = raised(1, Mute()).story(2, together=False, debug=False)
    assert story.endswith("error: rank 1 of 2 failed with Mute: its text cannot be made\n")


def test_stories_name_the_rank_last_and_once() -> None:
    def story(failure: Failure, *, together: bool = False, debug: bool = False) -> str:
        return failure.story(4, together=together, debug=debug)

    boom = story(raised(1, wrapped(RuntimeError("below"))))
    assert boom.endswith("ValueError: step 3 failed\nerror: rank 1 of 4 failed with ValueError: step 3 failed\n")
    assert "RuntimeError: below" in boom and boom.count("rank 1 of 4") == 1
    long = story(raised(1, ValueError("\x1b[31m" + "x" * 5000))).splitlines()[-1]
    assert long.startswith(r"error: rank 1 of 4 failed with ValueError: \x1b[31mxxx") and len(long) < 1300
    typed = raised(2, CheckpointError("a.safetensors is damaged"))
    assert story(typed) == "error: rank 2 of 4: a.safetensors is damaged\n"
    assert story(typed, together=True) == "error: a.safetensors is damaged\n"
    assert story(typed, together=True, debug=True).startswith("tp.errors.CheckpointError")
    assert story(Failure(3, status=-9)) == "error: rank 3 of 4 was killed by SIGKILL (out of memory?)\n"
    assert story(Failure(3, status=-11)) == "error: rank 3 of 4 was killed by SIGSEGV\n"
    assert story(Failure(3, status=5)) == "error: rank 3 of 4 exited with status 5\n"


def test_an_error_of_all_ranks_is_told_as_one() -> None:
    errors = [raised(rank, CommunicationError("no GPUs")) for rank in range(3)]
    assert failures.all_alike(errors, 3)
    assert not failures.all_alike(errors[:2], 3)
    assert not failures.all_alike([*errors[:2], raised(2, CommunicationError("other"))], 3)
    assert not failures.all_alike([raised(rank, ValueError("x")) for rank in range(3)], 3)


def test_records_survive_the_way_through_a_file(tmp_path: Path) -> None:
    """In the format of torch's elastic launcher, which must be able to read them too."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    paths = [tmp_path / str(rank) / "error.json" for rank in range(2)]
    records = [raised(4, CheckpointError("gone"), 1.5), raised(5, ValueError("boom"), 2.5)]
    for path, record in zip(paths, records, strict=True):
        path.parent.mkdir()
        record.write(path)
    assert sorted(failures.beside(paths[1]), key=lambda failure: failure.rank) == records
    process = ProcessFailure(local_rank=1, pid=1, exitcode=7, error_file=str(paths[1]))
    read = failures.of_process(5, process.exitcode, process.error_file_data)
    assert (read.message, read.rank, read.status, read.when) == ("ValueError: boom", 5, 7, 2.5)
    torchs_own = {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "trace", "timestamp": "12"}}}
    assert failures.of_process(1, 1, torchs_own).trace == "trace"
    assert not failures.of_process(1, -9, json.loads('{"message": "<NONE>"}')).recorded
