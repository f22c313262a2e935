"""What a training run reports: a JSON object a line, and a picture of it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from tp.errors import CheckpointError
from tp.json_objects import parse

STEP, EVALUATION = "step", "evaluation"
"""Values of "kind" in a record."""


def bits_per_byte(loss: float, num_labels: int, num_bytes: int) -> float:
    """Σ loss in bits over the bytes of the text that was predicted; comparable between tokenizers.

    Args:
        loss: mean nats a label.
        num_bytes: of the text that the labels spell.
    """
    return loss * num_labels / (math.log(2) * max(1, num_bytes))


class MetricsLog:
    """The metrics of a run, appended to a JSONL file as they come. One process writes it.

    Args:
        path: of the file; made where it is not there.
        steps_done: where the run begins or resumes. Records of later steps, which a run that was interrupted left
            behind its last checkpoint, are dropped: these steps are done again.

    Raises:
        CheckpointError: the file cannot be written.
    """

    def __init__(self, path: Path, steps_done: int = 0) -> None:
        self.path = path
        try:
            self._rewrite([record for record in read_metrics(path) if record["step"] <= steps_done])
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error

    def append(self, record: dict[str, Any]) -> None:
        """Writes a record, at once. "step" must be among its fields.

        Raises:
            CheckpointError: it cannot be written.
        """
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def close(self) -> None:
        self._file.close()

    def _rewrite(self, records: list[dict[str, Any]]) -> None:
        unfinished = self.path.with_name(f".{self.path.name}.unfinished")
        unfinished.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        os.replace(unfinished, self.path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, in order; none where there is no file. What a crash cut off is left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [record for record in map(_record_of, lines) if record is not None]


def plot_metrics(records: list[dict[str, Any]], path: Path) -> None:
    """Draws training loss, evaluations and learning rate over the steps as a PNG. Needs matplotlib.

    Raises:
        CheckpointError: the picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [record for record in records if record.get("kind") == STEP]
    evaluations = [record for record in records if record.get("kind") == EVALUATION]
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    single = "." if len(steps) == 1 else None
    lines = [_draw(axes, steps, "loss", "training loss", color="tab:blue", linewidth=0.9, alpha=0.8, marker=single)]
    if evaluations:
        lines += [_draw(axes, evaluations, "loss", "evaluation loss", color="tab:orange", linewidth=1.5, marker="o")]
        axes.set_title(_last_evaluation(evaluations[-1]), fontsize="medium")
    rates = axes.twinx()
    rates.set_ylabel("learning rate")
    rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    rates.set_ylim(0, 1.05 * max([record["learning_rate"] for record in steps], default=1.0))
    lines += [_draw(rates, steps, "learning_rate", "learning rate", color="tab:green", linewidth=1, linestyle="--")]
    axes.legend(handles=lines, loc="upper right")
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        FigureCanvasAgg(figure).print_png(str(unfinished))
        os.replace(unfinished, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error


def _draw(axes: Any, records: list[dict[str, Any]], field: str, label: str, **style: Any) -> Any:
    (line,) = axes.plot([r["step"] for r in records], [r[field] for r in records], label=label, **style)
    return line


def _last_evaluation(record: dict[str, Any]) -> str:
    bits = f", {record['bits_per_byte']:.3f} bits per byte" if "bits_per_byte" in record else ""
    return f"evaluation at step {record['step']}: perplexity {record['perplexity']:.4g}{bits}"


def _record_of(line: str) -> dict[str, Any] | None:
    try:
        record = parse(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    drawn = {STEP: "learning_rate", EVALUATION: "perplexity"}
    needed = [name for kind, other in drawn.items() if record.get("kind") == kind for name in ("loss", other)]
    return record if all(isinstance(record.get(name), (int, float)) for name in needed) else None
