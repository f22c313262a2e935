"""What a sweep measures: every case, and who takes part in it with how much work. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

Phase = Literal["prefill", "decode", "train"]
Layout = Literal["replicate", "sharded"]
Scaling = Literal["strong", "weak-batch", "weak-tokens"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "train")
LAYOUTS: tuple[Layout, ...] = ("replicate", "sharded")
SCALINGS: tuple[Scaling, ...] = ("strong", "weak-batch", "weak-tokens")
OWN = "own"
"""The system that is this project's."""


@dataclass(frozen=True)
class Case:
    """One thing to measure, alike for all who take part; sizes are those at t = 1.

    Attributes:
        scaling: strong: the same work at every degree; weak-batch and weak-tokens: t times as many sequences, or
            t times as long ones.
        phase: prefill: to the first tokens; decode: a token of each sequence; train: an optimiser step.
        dtype: of the computation.
        batch: sequences.
        tokens: of each prompt, or of each row that is trained on.
        new_tokens: of each sequence: 1 for prefill, 0 for training.
    """

    scaling: Scaling
    phase: Phase
    dtype: str
    batch: int
    tokens: int
    new_tokens: int

    def __str__(self) -> str:
        return f"{self.phase}, {self.dtype}, batch {self.batch}, {self.lengths} tokens, {self.scaling} scaling"

    @property
    def lengths(self) -> str:
        """Tokens of a sequence; in decode those of its prompt, then the new ones."""
        return f"{self.tokens} + {self.new_tokens}" if self.phase == "decode" else str(self.tokens)


@dataclass(frozen=True)
class Form:
    """A system at one degree and in one layout.

    Attributes:
        system: `OWN`, or a peer's name.
        tp_size: t, its processes.
        threads: of each process.
        units: cores, or GPUs, that it computes on in all.
        layout: of the residual stream; None where there is but one.
    """

    system: str
    tp_size: int
    threads: int
    units: int
    layout: Layout | None = None

    @property
    def contestant(self) -> str:
        """The name of the processes that it runs in."""
        return f"{self.system} tp={self.tp_size}"

    @property
    def name(self) -> str:
        return self.contestant if self.layout is None else f"{self.contestant} {self.layout}"

    @property
    def is_baseline(self) -> bool:
        """Whether all others are compared with it."""
        return self.system == OWN and self.tp_size == 1


@dataclass(frozen=True)
class Sweep:
    """All that is to be measured.

    Attributes:
        forms: of this project: t = 1, then every other degree in every layout.
        peers: forms of other systems; they take part in prefill and decode.
        phases, scalings: which.
        dtypes, training_dtypes: of prefill and decode, and of training.
        batches: sequences.
        prompt_tokens, new_tokens: of each sequence in prefill and decode.
        row_tokens: of each row in training.
    """

    forms: tuple[Form, ...]
    peers: tuple[Form, ...]
    phases: tuple[Phase, ...]
    scalings: tuple[Scaling, ...]
    dtypes: tuple[str, ...]
    training_dtypes: tuple[str, ...]
    batches: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    row_tokens: tuple[int, ...]

    def cases(self) -> list[Case]:
        """In the order in which they are measured: what runs in the same processes is together, small before large."""
        serving = product(self.dtypes, [phase for phase in self.phases if phase != "train"])
        training = product(self.training_dtypes, [phase for phase in self.phases if phase == "train"])
        found = [
            Case(scaling, phase, dtype, batch, tokens, new_tokens)
            for dtype, phase in [*serving, *training]
            for scaling, tokens, batch, new_tokens in product(
                self.scalings, self._tokens(phase), sorted(self.batches), self._new_tokens(phase)
            )
        ]
        return list(dict.fromkeys(found))

    def forms_of(self, case: Case) -> list[Form]:
        """Who takes part."""
        return [*self.forms, *(() if case.phase == "train" else self.peers)]

    def largest(self) -> tuple[int, int]:
        """The most sequences at once, and the most tokens of a sequence, of any form in any case but training."""
        asked = [
            (*work_of(case, form), case.new_tokens)
            for case in self.cases()
            for form in self.forms_of(case)
            if case.phase != "train"
        ]
        return max((batch for batch, *_ in asked), default=1), max((sum(lengths) for _, *lengths in asked), default=1)

    def longest_row(self) -> int:
        """The most tokens of a row of any form in training; 0 where nothing is trained."""
        rows = [work_of(c, form)[1] for c in self.cases() for form in self.forms_of(c) if c.phase == "train"]
        return max(rows, default=0)

    def _tokens(self, phase: Phase) -> Sequence[int]:
        return sorted(self.row_tokens if phase == "train" else self.prompt_tokens)

    def _new_tokens(self, phase: Phase) -> Sequence[int]:
        return {"prefill": (1,), "decode": sorted(self.new_tokens), "train": (0,)}[phase]


def work_of(case: Case, form: Form) -> tuple[int, int]:
    """(sequences, tokens of each) of a form in a case."""
    batch = case.batch * (form.tp_size if case.scaling == "weak-batch" else 1)
    tokens = case.tokens * (form.tp_size if case.scaling == "weak-tokens" else 1)
    return batch, tokens


def growth(case: Case, form: Form) -> int:
    """How many times the work of t = 1 it has."""
    return 1 if case.scaling == "strong" else form.tp_size


def scaling_forms(degrees: Sequence[int], layouts: Sequence[Layout], total_threads: int, on_gpus: bool) -> list[Form]:
    """This project's forms: t = 1 first, with or without it among `degrees`.

    Args:
        total_threads: of every degree on CPUs; on GPUs, of the highest one.
        on_gpus: a GPU a rank; each rank then has as many threads at every degree.
    """
    higher = sorted({*degrees} - {1})
    most = max([1, *higher])

    def form(t: int, layout: Layout | None) -> Form:
        threads = max(1, total_threads // (most if on_gpus else t))
        return Form(OWN, t, threads, t if on_gpus else t * threads, layout)

    return [form(1, None), *(form(t, layout) for t in higher for layout in layouts)]
