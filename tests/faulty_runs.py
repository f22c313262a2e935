"""Real commands on two ranks, of which one fails, and what is left of them; see `faults/sitecustomize.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_name("faults")
LAUNCH = (sys.executable, "-m", "launch")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
            "--nproc-per-node", "2", "-m", "launch")  # fmt: skip
GENERATION_PHASES = ("start", "load", "prefill", "decode", "decode collective")
TIMEOUT_S = 15.0
"""--collective-timeout where a rank is absent: other runs beside it can keep a rank from its turn for some seconds."""
STARTS_WITHIN_S = 120.0
RUNS_AT_MOST_S = 300.0
CONFIG = {
    "model_type": "llama", "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 40, "max_position_embeddings": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What goes wrong, where, and over which collectives: "shared memory", "gloo", or "data parallel" (over gloo)."""

    cause: str
    phase: str
    communicator: str = "shared memory"
    rank: int = 1

    def __str__(self) -> str:
        return f"{self.cause} in {self.phase} over {self.communicator}"


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        seconds: between the failure of the rank, or of the launcher, and the end of the last process.
        left: processes that were still there, and files.
    """

    status: int
    err: str
    seconds: float
    left: tuple[str, ...]


class Run:
    """A command whose ranks fail as `fault` says.

    Args:
        directory: empty, for what the run reads and leaves.
        launcher: `LAUNCH` or `TORCHRUN`.
    """

    def __init__(self, fault: Fault, directory: Path, launcher: Sequence[str] = LAUNCH) -> None:
        self._fault = fault
        self._ends_all = launcher == LAUNCH  # torchrun leaves what ranks have started, and its logs
        self._notes, self._temporary = directory / "notes", directory / "temporary"
        self._notes.mkdir(parents=True)
        self._temporary.mkdir()
        environment = {
            **os.environ,
            "PYTHONPATH": f"{FAULTS}{os.pathsep}{ROOT}",
            "FAULT": f"{fault.cause},{fault.phase},{fault.rank}",
            "FAULT_DIRECTORY": str(self._notes),
            "TMPDIR": str(self._temporary),
        }
        if fault.communicator == "gloo":
            environment["TP_DECODER_DISABLE"] = "shared_memory"
        self.process = subprocess.Popen(
            [*launcher, *_command(fault, directory)],
            cwd=ROOT, env=environment, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )  # fmt: skip

    def wait_for_start(self) -> None:
        """Until both ranks have begun."""
        self._wait(lambda: len(list(self._notes.glob("processes-[0-9]"))) == 2)

    def wait_for_failure(self) -> None:
        """Until the rank fails."""
        self._wait((self._notes / "failed").exists)

    def outcome(self, began: float | None = None, patience_s: float = 60.0) -> Outcome:
        """Waits for the end of all processes, which are killed at last if it does not come.

        Args:
            began: seconds since the epoch; by default when the rank failed.
        """
        try:
            _, err = self.process.communicate(timeout=RUNS_AT_MOST_S)
        finally:
            self.process.kill()
        if began is None:
            assert (self._notes / "failed").exists(), f"{self._fault}: the run ended before: {err}"
            began = (self._notes / "failed").stat().st_mtime
        pairs = [path.read_text().split() for path in self._notes.glob("processes-?")]
        process_ids = [int(word) for pair in pairs for word in pair]
        looked_at = process_ids if self._ends_all else [int(rank) for rank, _ in pairs]
        deadline = time.monotonic() + patience_s
        while (left := self._left(looked_at)) and time.monotonic() < deadline:
            time.sleep(0.02)
        seconds = time.time() - began
        for process_id in filter(is_running, process_ids):
            os.kill(process_id, signal.SIGKILL)
        return Outcome(self.process.returncode, err, seconds, tuple(left))

    def _left(self, process_ids: Sequence[int]) -> list[str]:
        files = [name for name in os.listdir(self._temporary) if not name.startswith("torchinductor")]  # torch's cache
        return [*map(str, filter(is_running, process_ids)), *(files if self._ends_all else [])]

    def _wait(self, condition) -> None:
        deadline = time.monotonic() + STARTS_WITHIN_S
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)


def _command(fault: Fault, directory: Path) -> list[str]:
    common = ["--device", "cpu", "--json"]
    if fault.cause == "absent":
        common += ["--collective-timeout", str(TIMEOUT_S)]
    if fault.phase in GENERATION_PHASES and fault.communicator != "data parallel":
        model = ["--model", str(ROOT / "launch" / "embedded_model"), "--prompt-ids", "1,2,3"]
        return ["generate", "--tp", "2", *model, "--max-new-tokens", "12", "--ignore-eos", *common]
    (directory / "config.json").write_text(json.dumps(CONFIG))
    texts = [f"the {n} quick foxes jump over {n * n} lazy dogs. " * 4 for n in range(12)]
    (directory / "text.txt").write_text("\n<|document|>\n".join(texts))
    data = ["--config", str(directory / "config.json"), "--train-tokenizer", "300", "--data",
            str(directory / "text.txt"), "--data-cache", str(directory / "cache")]  # fmt: skip
    recipe = ["--steps", "5", "--warmup-steps", "1", "--sequence-length", "16", "--batch-size", "4"]
    degrees = ["--tp", "1", "--dp", "2"] if fault.communicator == "data parallel" else ["--tp", "2"]
    layout = ["--sequence-parallel", "off", "--output", str(directory / "output")]
    return ["train", *data, *recipe, *degrees, *layout, *common]


def is_running(process_id: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
