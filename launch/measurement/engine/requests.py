"""What this project's engine is asked for besides decoding, as lines of JSON; each line names its kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from launch.measurement.requests import Communication, DecodeRequest

KIND = "kind"
"""Key of a line's object. A line without it is a `DecodeRequest`, as every system takes it."""
Limit = Literal["matrix products", "memory"]
MATRIX_PRODUCTS: Limit = "matrix products"
MEMORY: Limit = "memory"


@dataclass(frozen=True)
class TrainingRequest:
    """One optimiser step.

    Attributes:
        rows: of the batch.
        row_tokens: of each row, one sequence.
        layout: of the residual stream, a value of --sequence-parallel.
    """

    rows: int
    row_tokens: int
    layout: str = "auto"

    def line(self) -> str:
        """The request as one line of JSON, without its end."""
        return json.dumps({KIND: "train", **asdict(self)})


@dataclass(frozen=True)
class TrainingAnswer:
    """What an optimiser step took.

    Attributes:
        milliseconds: forward, backward, clipping and update, on rank 0.
        loss: before the update, in nats a token.
        communication: None where there are no peers.
    """

    milliseconds: float
    loss: float
    communication: Communication | None

    def fields(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> TrainingAnswer:
        """The answer that `fields` came from.

        Raises:
            KeyError, TypeError, ValueError: they came from something else.
        """
        given = fields["communication"]
        communication = None if given is None else Communication.of_fields(given)
        return cls(float(fields["milliseconds"]), float(fields["loss"]), communication)


@dataclass(frozen=True)
class RateRequest:
    """How fast the ranks are together at what limits them.

    Attributes:
        of: FLOP/s of matrix products, or bytes a second of a GPU's memory.
        seconds: for which each rank works.
    """

    of: Limit
    seconds: float

    def line(self) -> str:
        """The request as one line of JSON, without its end."""
        return json.dumps({KIND: "rate", **asdict(self)})


@dataclass(frozen=True)
class TraceRequest:
    """A Chrome trace of each rank, while it carries out another request.

    Attributes:
        request: what to trace. Of one that decodes, the decode steps; of one for a single token, the prefill.
        directory: where the files go.
        name: what their names begin with.
    """

    request: DecodeRequest | TrainingRequest
    directory: str
    name: str

    def line(self) -> str:
        """The request as one line of JSON, without its end."""
        return json.dumps({KIND: "trace", "line": self.request.line(), "directory": self.directory, "name": self.name})


EngineRequest = DecodeRequest | TrainingRequest | RateRequest | TraceRequest


def request_of_line(line: str) -> EngineRequest:
    """The request that `line` made.

    Raises:
        ValueError: no such kind.
    """
    fields = json.loads(line)
    kind = fields.pop(KIND, None)
    if kind is None:
        return DecodeRequest.of_line(line)
    if kind == "train":
        return TrainingRequest(**fields)
    if kind == "rate":
        return RateRequest(**fields)
    if kind == "trace":
        traced = request_of_line(fields["line"])
        assert isinstance(traced, (DecodeRequest, TrainingRequest))
        return TraceRequest(traced, fields["directory"], fields["name"])
    raise ValueError(f"a request of kind {kind!r}, which nobody here knows")
