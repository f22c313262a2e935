"""What one forward of a prompt shows of a model: plain numbers, ready to be drawn or written as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from launch.inspection.token_text import TokenTexts


@dataclass(frozen=True)
class Run:
    """What was run, and in which numbers."""

    model: str
    tp_size: int
    dtype: str
    weights: str
    device: str
    norm_placement: str


@dataclass(frozen=True)
class LayerFindings:
    """One layer, a value for each position that is shown.

    Attributes:
        stream_norms: ‖x‖ of the state after the layer.
        attention_norms, mlp_norms: ‖a‖ and ‖m‖ of what the sublayers write.
        attention_cosines, mlp_cosines: between a write and the state that it is added to.
    """

    stream_norms: tuple[float, ...]
    attention_norms: tuple[float, ...]
    mlp_norms: tuple[float, ...]
    attention_cosines: tuple[float, ...]
    mlp_cosines: tuple[float, ...]


@dataclass(frozen=True)
class LensCell:
    """What the model would predict at one position if it ended at one state of the stream.

    Attributes:
        token_ids, probabilities: the likeliest tokens, the likeliest first.
        entropy: nats, of the whole distribution.
        kl: nats, KL(p_final ‖ p_lens): what coding the model's own next token by this distribution costs more.
    """

    token_ids: tuple[int, ...]
    probabilities: tuple[float, ...]
    entropy: float
    kl: float


@dataclass(frozen=True)
class Attribution:
    """Addends of a logit, or of the difference of two, at the last position, with the final norm's scale held.

    Attributes:
        logit: from the last state; embedding + attention + mlp + final_bias + rounding, but for float64's own error.
        embedding: of the token itself.
        attention, mlp: of each layer's writes.
        heads: [layers][query heads]: parts of `attention`.
        attention_bias: the rest of `attention`: of each output projection's bias.
        final_bias: of the final norm's bias, of models that have one.
        rounding: of what the adds to the stream rounded off.
    """

    logit: float
    embedding: float
    attention: tuple[float, ...]
    mlp: tuple[float, ...]
    heads: tuple[tuple[float, ...], ...]
    attention_bias: tuple[float, ...]
    final_bias: float
    rounding: float


@dataclass(frozen=True)
class Findings:
    """Everything that a report shows.

    Attributes:
        token_ids: of the whole prompt.
        positions: those that values are given for, ascending; the first and the last are among them.
        embed_norms: ‖x_0‖, for each of these positions.
        lens: [states][positions]: after the embedding, then after each layer.
        target_id, against_id: whose logit (difference) is attributed.
        target_by_state: the target's probability in the lens at the last position, in each state.
        attribution: None where the model's norms leave no linear path; `no_attribution` says why.
    """

    run: Run
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    embed_norms: tuple[float, ...]
    layers: tuple[LayerFindings, ...]
    lens: tuple[tuple[LensCell, ...], ...]
    target_id: int
    against_id: int | None
    target_by_state: tuple[float, ...]
    attribution: Attribution | None
    no_attribution: str = ""

    @property
    def target_probability(self) -> float:
        """That the target comes next."""
        return self.target_by_state[-1]

    def as_json(self, texts: TokenTexts) -> dict[str, Any]:
        """The object that --json prints; docs/cli.md gives its fields."""
        return {
            **asdict(self.run),
            "token_ids": self.token_ids,
            "tokens": texts.texts(self.token_ids),
            "positions": self.positions,
            "target": self._token(self.target_id, texts) | {"probability": self.target_probability},
            "against": None if self.against_id is None else self._token(self.against_id, texts),
            "target_by_state": self.target_by_state,
            "embed_norms": self.embed_norms,
            "layers": [asdict(layer) for layer in self.layers],
            "lens": [[self._cell(cell, texts) for cell in state] for state in self.lens],
            "attribution": None if self.attribution is None else asdict(self.attribution),
        }

    @staticmethod
    def _token(token_id: int, texts: TokenTexts) -> dict[str, Any]:
        return {"token_id": token_id, "token": texts.text(token_id)}

    @staticmethod
    def _cell(cell: LensCell, texts: TokenTexts) -> dict[str, Any]:
        return {**asdict(cell), "tokens": texts.texts(cell.token_ids)}


def mean_of_others(values: tuple[float, ...]) -> float | None:
    """The mean over all positions but the first; None where there is no other."""
    return math.fsum(values[1:]) / (len(values) - 1) if len(values) > 1 else None


def signed(value: float) -> str:
    """A contribution as it is shown: "+1.23", with a minus sign where it is negative."""
    return f"{value:+.2f}".replace("-", "−")


def state_names(num_layers: int) -> list[str]:
    """Names of the states of the stream: after the embedding, then after each layer."""
    return ["embed", *map(str, range(num_layers))]
