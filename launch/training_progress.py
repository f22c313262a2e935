"""How a training run is shown while it runs: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from launch.terminal import Terminal

if TYPE_CHECKING:
    import torch

    from tp.config import ModelConfig
    from tp.training.trainer import StepMetrics

LINE_EVERY_S = 10.0


@dataclass(frozen=True)
class Speed:
    """What turns the seconds of a step into rates.

    Attributes:
        tokens: of one step, all ranks.
        flops: of one step, all ranks: the model's, recomputation not counted.
        peak_flops: of all ranks' devices together; None where it is not known.
    """

    tokens: int
    flops: float
    peak_flops: float | None

    @classmethod
    def of(cls, config: ModelConfig, sequence_length: int, rows: int, device: torch.device, num_ranks: int) -> Speed:
        """Of steps of `rows` rows on `num_ranks` devices like `device`."""
        from tp.training.flops import peak_flops, training_flops_per_token

        tokens, peak = rows * sequence_length, peak_flops(device)
        flops = tokens * training_flops_per_token(config, sequence_length)
        return cls(tokens, flops, None if peak is None else peak * num_ranks)

    def rates(self, seconds: float) -> dict[str, float]:
        """Tokens a second, and the share of the peak that the model's operations reach ("mfu") where it is known."""
        rates = {"tokens_per_s": self.tokens / seconds}
        if self.peak_flops is not None:
            rates["mfu"] = self.flops / seconds / self.peak_flops
        return rates


class TrainingDisplay:
    """Shows steps on stderr. Entered around the run.

    Args:
        terminal: of this rank; one that does not speak shows nothing.
        first_step, total_steps: where the run begins and ends.
    """

    def __init__(self, terminal: Terminal, speed: Speed, first_step: int, total_steps: int) -> None:
        self._speed = speed
        self._total = total_steps
        self._console = terminal.console
        self._is_live = terminal.speaks and terminal.err.isatty()
        self._bar: Any = None
        self._first_step = first_step
        self._last_line = time.monotonic()

    def __enter__(self) -> TrainingDisplay:
        if self._is_live:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns: list[Any] = [MofNCompleteColumn(), BarColumn(None), TextColumn("{task.description}")]
            self._bar = Progress(*columns, TextColumn("ETA"), TimeRemainingColumn(), console=self._console)
            self._task = self._bar.add_task("", total=self._total, completed=self._first_step)
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, metrics: StepMetrics) -> None:
        """After each step."""
        rates = self._speed.rates(metrics.seconds)
        parts = [f"loss {metrics.loss:.4f}", f"{rates['tokens_per_s']:,.0f} tokens/s"]
        if "mfu" in rates:
            parts.append(f"MFU {rates['mfu']:.1%}")
        text = ", ".join(parts)
        if self._bar is not None:
            self._bar.update(self._task, completed=metrics.step, description=text)
        elif time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            self.say(f"step {metrics.step}/{self._total}: {text}")

    def say(self, text: str) -> None:
        """A line that stays, above the bar."""
        self._console.print(text, soft_wrap=True, markup=False)
