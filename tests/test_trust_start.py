"""What can be wrong with a machine when a run starts: a run all the same, or one line that says what is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faulty_runs import LAUNCH, ROOT

from launch import failures, model_command, ranks, script
from launch.__main__ import main
from launch.addresses import Endpoint
from launch.rank_process import LAUNCHER
from launch.ranks import Placement
from tp.errors import CommunicationError, RankFailedError, RequestError
from tp.parallel import TensorParallelGroup

GENERATE = [
    *LAUNCH, "generate", "--tp", "2", "--device", "cpu", "--json", "--model", str(ROOT / "launch" / "embedded_model"),
    "--prompt-ids", "1,2,3", "--max-new-tokens", "4", "--ignore-eos",
]  # fmt: skip


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **variables}


def finish(command: list[str], timeout_s: float = 100.0, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=environment(**variables), text=True, capture_output=True, stdin=subprocess.DEVNULL,
        timeout=timeout_s,
    )  # fmt: skip


def check_refused(run: subprocess.CompletedProcess[str], error: type[CommunicationError | RequestError]) -> str:
    assert (run.returncode, run.stdout) == (error.exit_code, ""), run
    assert run.stderr.startswith("error: ") and run.stderr.count("\n") == 1, run
    return run.stderr


# In this process


@pytest.mark.parametrize(
    "variables, told",
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' in the environment is no number"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE='' in the environment is no number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "y"}, "LOCAL_WORLD_SIZE='y' in the environment is no"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 in the environment is outside 0..1 (WORLD_SIZE=2)"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1 in the environment is outside 0..1"),
    ],
)
def test_a_launchers_variables_that_make_no_sense(
    variables: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["info"]) == CommunicationError.exit_code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {told}") and err.count("\n") == 1


@pytest.mark.parametrize(
    "options, told",
    [
        (["--rdzv-backend", "foo"], "argument --rdzv-backend: invalid choice: 'foo'"),
        (["--local-addr", "999.1.1.1"], "argument --local-addr: '999.1.1.1' is no address such as"),
        (["--local-addr", ""], "argument --local-addr: '' is no address such as"),
        (["--local-addr", "192.0.2.1"], "--local-addr 192.0.2.1 is no address of this machine: name one that it has"),
        (["--collective-timeout", "0"], "'0' is not a number of seconds above 0"),
        (["--collective-timeout", "nan"], "'nan' is not a number of seconds above 0"),
        (["--collective-timeout", "1e7"], "'1e7' is not a number of seconds above 0, and below 1000000"),
    ],
)
def test_options_that_are_refused(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GENERATE[3:], *options]) == RequestError.exit_code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and told in err and err.count("\n") == 1


def test_a_module_that_is_not_there_is_told_from_one_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text("import absent_below")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("absent", "absent.below", "json.absent", ".relative", "broken_package2.absent"):
        with pytest.raises(RequestError, match=f"there is no module {name}"):
            script._run_module(name)
    with pytest.raises(ModuleNotFoundError, match="absent_below"):
        script._run_module("broken_package.module")


def test_a_wrong_network_interface_is_refused_before_gloo_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo,absent0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CommunicationError, match="GLOO_SOCKET_IFNAME=lo,absent0 names no .* which has .*lo"):
        TensorParallelGroup.from_environment("gloo", "cpu")
    assert not dist.is_initialized()


def test_a_torch_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CommunicationError, match="built without NCCL: use --backend gloo"):
        TensorParallelGroup.from_environment()


def test_a_cuda_build_without_a_gpu_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert model_command._tp_size(Namespace(tp=None, device="auto", nnodes=1)) == 1
    assert TensorParallelGroup.from_environment().device.type == "cpu"
    with pytest.raises(CommunicationError, match="torch sees no CUDA device: use --device cpu"):
        TensorParallelGroup.from_environment(device="cuda")


def test_one_machine_needs_no_endpoint() -> None:
    """A script may pass one always; a name without an address is not waited for."""
    placement = Placement(2, rdzv_backend="static", rdzv_endpoint="absent.invalid:1")
    began = time.monotonic()
    config = ranks._config(placement, "/tmp")
    assert (config.rdzv_backend, config.rdzv_endpoint, config.local_addr) == ("c10d", "127.0.0.1:0", "127.0.0.1")
    assert time.monotonic() - began < 5.0


def test_that_a_name_is_waited_for_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def look_up(*arguments: object, **options: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(CommunicationError, match="the name node has no address on this machine"):
        Endpoint("node", 1).addresses(patience_s=0.6)
    assert capsys.readouterr().err == "waiting up to 0.6 s for an address of node\n"


def test_no_room_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*arguments: object, **options: object) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("launch.ranks.tempfile.mkdtemp", no_room)
    with pytest.raises(RequestError, match="no temporary directory can be made .No usable .*: TMPDIR names another"):
        ranks.start(["-c", ""], Placement(1))


def test_too_few_open_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.ranks.resource.getrlimit", lambda which: (31, 31))
    with pytest.raises(RequestError, match="ulimit -n is 31: 2 ranks need 32 open files, raise it"):
        ranks.start(["-c", ""], Placement(2))


def test_no_further_process_can_be_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("launch.ranks.tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("launch.process_guard.subprocess.Popen", refuse)
    with pytest.raises(RequestError, match="no further process can be started .Resource .*: end others, or raise ul"):
        ranks.start(["-c", ""], Placement(1))
    assert not list(tmp_path.iterdir())


def test_a_rank_that_cannot_leave_its_record_tells_by_itself(tmp_path: Path) -> None:
    """As on a disk that has become full; its launcher knows no more than the exit status."""
    path = tmp_path / "script.py"
    path.write_text("raise ValueError('boom on purpose')")
    variables = {"RANK": "1", "WORLD_SIZE": "2", LAUNCHER: str(os.getpid()), "TORCHELASTIC_ERROR_FILE": "/dev/null/no"}
    run = finish([sys.executable, "-m", "launch.script", "script", str(path)], **variables)
    assert run.returncode == RankFailedError.exit_code
    assert run.stderr.endswith("error: rank 1 of 2 failed with ValueError: boom on purpose\n")


def test_a_script_that_changes_its_environment_leaves_its_record(tmp_path: Path) -> None:
    path, record = tmp_path / "script.py", tmp_path / "0" / "error.json"
    record.parent.mkdir()
    path.write_text("import os; os.environ.clear(); raise ValueError('boom on purpose')")
    variables = {"RANK": "1", "WORLD_SIZE": "2", LAUNCHER: str(os.getpid()), "TORCHELASTIC_ERROR_FILE": str(record)}
    finish([sys.executable, "-m", "launch.script", "script", str(path)], **variables)
    (failure,) = failures.beside(record)
    assert (failure.rank, failure.message) == (1, "ValueError: boom on purpose")


# Real runs


@pytest.mark.long
def test_a_module_that_is_not_there_is_told_once() -> None:
    told = check_refused(finish([*LAUNCH, "run", "--nproc", "2", "-m", "no.such.module"]), RequestError)
    assert told == "error: there is no module no.such.module\n"


@pytest.mark.long
def test_two_runs_at_once_on_one_host() -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    runs = [subprocess.Popen(GENERATE, cwd=ROOT, env=environment(), text=True, **pipes) for _ in range(2)]
    found = [(run.communicate(timeout=100), run.returncode) for run in runs]
    assert [status for _, status in found] == [0, 0], found
    ids = [json.loads(out)["sequences"][0]["new_ids"] for (out, _), _ in found]
    assert ids[0] == ids[1] and len(ids[0]) == 4


SCRIPT = """
import os
import torch
from tp.parallel import TensorParallelGroup

group = TensorParallelGroup.from_environment("gloo", "cpu")
total = group.communicator.all_reduce(torch.ones(1))
os.write(1, f"{total.item()}\\n".encode())
"""


@pytest.mark.long
@pytest.mark.parametrize("over", ["shared memory", "gloo"])
def test_a_script_that_does_not_close_its_group_ends_well(over: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    switched_off = "shared_memory" if over == "gloo" else ""
    for _ in range(5):
        run = finish([*LAUNCH, "run", "--nproc", "2", str(path)], TP_DECODER_DISABLE=switched_off)
        assert (run.returncode, run.stdout) == (0, "2.0\n2.0\n") and "error" not in run.stderr.lower(), run


@contextlib.contextmanager
def busy_port(*, answers: bool) -> Iterator[int]:
    """A port of another program, which says nothing, or something of its own."""
    server = socket.create_server(("127.0.0.1", 0))
    held = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                held.append(connection)
                if answers:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    connection.close()

    threading.Thread(target=serve, daemon=True).start()
    yield server.getsockname()[1]
    server.close()
    for connection in held:
        connection.close()


@pytest.mark.long
@pytest.mark.parametrize("backend", ["c10d", "static"])
@pytest.mark.parametrize("answers", [True, False])
def test_a_busy_rendezvous_port_is_refused(answers: bool, backend: str) -> None:
    with busy_port(answers=answers) as port:
        options = ["--nnodes", "2", "--rdzv-backend", backend, "--rdzv-endpoint", f"127.0.0.1:{port}"]
        options += ["--node-rank", "0"] if backend == "static" else []
        run = finish([*GENERATE, *options])
    assert (run.returncode, run.stdout) == (CommunicationError.exit_code, ""), run
    (told,) = (line for line in run.stderr.splitlines() if line.startswith("error: "))  # torch's store warns too
    assert f"127.0.0.1:{port} does not answer as a launcher does" in told or "EADDRINUSE" in told


def namespaces() -> bool:
    """Whether mounts of one's own are permitted."""
    return sys.platform == "linux" and not subprocess.run(["unshare", "-mu", "true"], capture_output=True).returncode


HOSTS = "127.0.0.1 localhost\n192.0.2.9 elsewhere\nfd00::9 six\n"
ONLY_READ = "mount -t tmpfs -o ro tmpfs"
FULL = (
    "mount -t tmpfs -o size=16k,nr_inodes=3 tmpfs {scratch} && touch {scratch}/a {scratch}/b; "
    "head -c 99k /dev/zero > {scratch}/a || true"
)
MACHINES = {
    "home is read-only": (f"{ONLY_READ} {{scratch}}", {"HOME": "{scratch}", "XDG_CACHE_HOME": "{scratch}/cache"}),
    "home is full": (FULL, {"HOME": "{scratch}", "XDG_CACHE_HOME": "{scratch}/cache"}),
    "the temporary directory is read-only": (f"{ONLY_READ} {{scratch}}", {"TMPDIR": "{scratch}"}),
    "the temporary directory is full": (FULL, {"TMPDIR": "{scratch}"}),
    "shared memory is small": ("mount -t tmpfs -o size=4k tmpfs /dev/shm", {}),
    "there is no shared memory": (f"{ONLY_READ} /dev/shm", {}),
    "the host name has no address": ("hostname absent.invalid", {}),
    "the host name has an IPv6 address only": ("mount --bind {hosts} /etc/hosts && hostname six", {}),
    "the host name is elsewhere": ("mount --bind {hosts} /etc/hosts && hostname elsewhere", {}),
}
"""What is done in namespaces of mounts and names, and with which environment."""


@pytest.mark.long
@pytest.mark.parametrize("machine", MACHINES)
def test_a_poor_machine_does_as_well(machine: str, tmp_path: Path) -> None:
    if not namespaces():
        pytest.skip("namespaces of mounts and host names are not permitted")
    (tmp_path / "scratch").mkdir()
    (tmp_path / "hosts").write_text(HOSTS)
    places = {"scratch": str(tmp_path / "scratch"), "hosts": str(tmp_path / "hosts")}
    prepare, variables = MACHINES[machine]
    shell = f"{prepare.format(**places)} && exec {shlex.join(GENERATE)}"
    variables = {name: value.format(**places) for name, value in variables.items()}
    run = finish(["unshare", "-mu", "sh", "-c", shell], **variables)
    assert run.returncode == 0, run
    assert len(json.loads(run.stdout)["sequences"][0]["new_ids"]) == 4
