"""A training run that is killed again and again: no checkpoint is lost, and it ends as if nothing had happened.

    python -m benchmarks.soak_training [--steps 1000] [--save-every 50] [--kill-every 100] [--tp 2] [--json FILE]

`tp-decoder train` runs a small model on eleven books of the King James Bible. After each --kill-every steps the
launcher is killed (SIGKILL), each time at another moment, and the run is started again with --resume. An undisturbed
run of the same recipe goes before. The losses of every step have to be the same bits, and nothing may be left of a
killed run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from launch.arguments import output_file, positive
from launch.measurement.command_line import tell
from tp.errors import RankFailedError

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "benchmarks" / "data" / "king-james-bible.txt"
TOKENIZER = ROOT / "launch" / "embedded_model"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024, "hidden_size": 48,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
GONE_WITHIN_S = 10.0
PATIENCE_S = 300.0


class Run:
    """`tp-decoder train` with an output directory, started as often as it takes."""

    def __init__(self, arguments: argparse.Namespace, directory: Path, output: Path) -> None:
        (directory / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        self.output = output
        self._log = output.with_suffix(".log")
        self._command = [
            sys.executable, "-m", "launch", "train", "--config", str(directory / "config.json"),
            "--tokenizer", str(TOKENIZER), "--data", str(DATA), "--data-cache", str(directory / "cache"),
            "--sequence-length", "16", "--batch-size", "4", "--steps", str(arguments.steps), "--log-every", "1",
            "--save-every", str(arguments.save_every), "--output", str(output), "--tp", str(arguments.tp),
            "--device", "cpu", "--resume", "--json",
        ]  # fmt: skip

    def start(self) -> subprocess.Popen[bytes]:
        """Goes on from the newest checkpoint, in a session of its own."""
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    def last_word(self) -> str:
        """The last line that the run wrote."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return lines[-1] if lines else "nothing"

    def losses(self) -> dict[int, float]:
        """By step; of a step that was made again, the last."""
        path = self.output / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return {row["step"]: row["loss"] for row in rows if "loss" in row}

    def checkpoints(self) -> list[int]:
        """Steps of the complete ones."""
        from tp.training.store import CheckpointStore

        return CheckpointStore(self.output).steps() if self.output.exists() else []


def wait_until(run: Run, process: subprocess.Popen[bytes], step: int) -> None:
    """Until a step is in the metrics.

    Raises:
        RankFailedError: the run ended before it, or is too slow.
    """
    deadline = time.monotonic() + PATIENCE_S
    while max(run.losses(), default=0) < step:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RankFailedError(f"step {step} is not reached, status {process.poll()}: {run.last_word()}")
        time.sleep(0.05)


def kill(process: subprocess.Popen[bytes]) -> float:
    """Kills the launcher alone; seconds until nothing of its session runs.

    Raises:
        RankFailedError: something does.
    """
    session = os.getsid(process.pid)
    began = time.monotonic()
    process.send_signal(signal.SIGKILL)
    process.wait()
    while left := in_session(session):
        if time.monotonic() - began > GONE_WITHIN_S:
            raise RankFailedError(f"processes {left} are left of a killed run")
        time.sleep(0.02)
    return time.monotonic() - began


def in_session(session: int) -> list[int]:
    """The processes that run in it, without those that have ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(of) == session and state != "Z":
            found.append(int(path.parent.name))
    return found


def soak(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The undisturbed run, then the one that is killed; what was seen.

    Raises:
        RankFailedError: a run does not do what it should, or a checkpoint is lost.
    """
    whole = Run(arguments, directory, directory / "whole")
    if whole.start().wait():
        raise RankFailedError(f"the undisturbed run failed: {whole.last_word()}")
    run = Run(arguments, directory, directory / "killed")
    kills, process = [], run.start()
    for number, step in enumerate(range(arguments.kill_every, arguments.steps, arguments.kill_every)):
        wait_until(run, process, step)
        time.sleep(0.03 * (number % 7))  # in the save, after it, in the steps that follow
        reached, seconds = max(run.losses()), kill(process)
        saved = run.checkpoints()
        if saved[-1] < step - arguments.save_every:
            raise RankFailedError(f"killed after step {reached}, the newest checkpoint is of step {saved[-1]}")
        kills.append({"after_step": reached, "checkpoint": saved[-1], "gone_s": seconds})
        tell(f"killed after step {reached}, gone in {seconds:.2f} s, goes on from step {saved[-1]}")
        process = run.start()
    if process.wait():
        raise RankFailedError(f"the last part of the run failed: {run.last_word()}")
    expected = list(range(arguments.save_every, arguments.steps + 1, arguments.save_every))
    return {
        "steps": arguments.steps,
        "tp_size": arguments.tp,
        "kills": kills,
        "same_losses": run.losses() == whole.losses() and len(run.losses()) == arguments.steps,
        "all_checkpoints": run.checkpoints() == expected,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=1000)
    parser.add_argument("--save-every", type=positive, default=50)
    parser.add_argument("--kill-every", type=positive, default=100)
    parser.add_argument("--tp", type=positive, default=2)
    parser.add_argument("--json", type=output_file, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tp-soak-") as directory:
        seen = soak(arguments, Path(directory))
    if arguments.json:
        arguments.json.write_text(json.dumps(seen, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(seen, indent=1))
    return 0 if seen["same_losses"] and seen["all_checkpoints"] else 1


if __name__ == "__main__":
    sys.exit(main())
