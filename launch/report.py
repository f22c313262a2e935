"""What a generation took: the JSON object and the table."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tp.generation import GenerationResult, LanguageModel


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank; `peak_rss_bytes` is the most that the process has had resident."""

    weight_bytes: int
    kv_bytes: int
    checkpoint_bytes_read: int
    peak_rss_bytes: int

    @classmethod
    def of_this_rank(cls, model: LanguageModel, kv_bytes: int) -> RankMemory:
        """What the model holds here and what its loading read."""
        from tp.checkpoint import weight_bytes

        read = model.load_report.bytes_read if model.load_report else 0
        return cls(weight_bytes(model), kv_bytes, read, peak_rss_bytes())


@dataclass(frozen=True)
class Communication:
    """Collectives of rank 0 during the request, waiting for peers included."""

    calls: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Report:
    """Everything that there is to say about a generation.

    Attributes:
        load_s: from the start of loading to a model that can answer.
        seconds: of the request, on rank 0.
    """

    model: str
    tp_size: int
    dtype: str
    weights: str
    device: str
    result: GenerationResult
    load_s: float
    seconds: float
    ranks: tuple[RankMemory, ...]
    communication: Communication

    def json(self) -> str:
        """One object on one line; docs/cli.md gives its fields."""
        timings = self.result.timings
        content: dict[str, Any] = {
            "model": self.model,
            "tp_size": self.tp_size,
            "dtype": self.dtype,
            "weights": self.weights,
            "device": self.device,
            "sequences": [
                {
                    "prompt_ids": sequence.prompt_ids,
                    "new_ids": sequence.new_ids,
                    "text": sequence.text,
                    "finish_reason": sequence.finish_reason,
                    "logprobs": sequence.logprobs,
                }
                for sequence in self.result.sequences
            ],
            "timings": {
                "load_s": self.load_s,
                "ttft_ms": timings.ttft_s * 1e3,
                "tpot_ms": timings.tpot_s * 1e3,
                "tokens_per_s": timings.tokens_per_s,
            },
            "ranks": [asdict(rank) for rank in self.ranks],
            "communication": asdict(self.communication),
        }
        return json.dumps(content, ensure_ascii=False)

    def print_to(self, console: Console) -> None:
        """The table, under a line that says what was run."""
        console.print(self._title(), soft_wrap=True, markup=False)
        console.print(self._table())

    def _table(self) -> Table:
        from rich.box import ROUNDED
        from rich.table import Table

        table = Table(box=ROUNDED, show_header=False)
        table.add_column(style="dim")
        table.add_column()
        for name, value in self._rows():
            table.add_row(name, value)
        return table

    def _title(self) -> str:
        ranks = "1 rank" if self.tp_size == 1 else f"{self.tp_size} ranks"
        numbers = self.dtype if self.weights == "plain" else f"{self.dtype} with {self.weights} weights"
        return f"{self.model}, {ranks}, {numbers} on {self.device}"

    def _rows(self) -> list[tuple[str, str]]:
        timings, spent = self.result.timings, self.communication
        rows = [
            ("load time", f"{self.load_s:.2f} s"),
            ("time to first token", f"{timings.ttft_s * 1e3:.1f} ms"),
            ("time per output token", f"{timings.tpot_s * 1e3:.1f} ms"),
            ("decode", f"{timings.tokens_per_s:.1f} tokens/s"),
            ("weights a rank", self._spread("weight_bytes")),
            ("KV cache a rank", self._spread("kv_bytes")),
            ("checkpoint read a rank", self._spread("checkpoint_bytes_read")),
            ("peak memory a rank", self._spread("peak_rss_bytes")),
        ]
        if self.tp_size > 1:
            share = 100 * spent.seconds / self.seconds if self.seconds else 0.0
            rows += [
                ("collectives", f"{spent.calls:,}, {size(spent.bytes)}"),
                ("time in them", f"{spent.seconds:.2f} s, {share:.0f} % of {self.seconds:.2f} s"),
            ]
        return rows

    def _spread(self, field: str) -> str:
        values = [getattr(rank, field) for rank in self.ranks]
        low, high = size(min(values)), size(max(values))
        return low if low == high else f"{low} to {high}"


def size(count: int) -> str:
    """Bytes in the largest decimal unit that leaves at least one."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"


def peak_rss_bytes() -> int:
    """The most memory that this process has had resident."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
