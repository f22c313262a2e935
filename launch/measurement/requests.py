"""What contestants are asked and what they answer, as lines of JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class DecodeRequest:
    """A batch of prompts to continue greedily, whatever end ids come up.

    Attributes:
        prompt_ids: token ids of each prompt of the batch.
        new_tokens: how many tokens each sequence gets.
        layout: of the residual stream, a value of --sequence-parallel; for this project's engine alone.
    """

    prompt_ids: tuple[tuple[int, ...], ...]
    new_tokens: int
    layout: str = "auto"

    @property
    def batch(self) -> int:
        return len(self.prompt_ids)

    def line(self) -> str:
        """The request as one line of JSON, without its end."""
        return json.dumps(asdict(self))

    @classmethod
    def of_line(cls, line: str) -> DecodeRequest:
        """The request that `line` made."""
        fields = json.loads(line)
        prompt_ids = tuple(tuple(ids) for ids in fields["prompt_ids"])
        return cls(prompt_ids, fields["new_tokens"], fields.get("layout", "auto"))


@dataclass(frozen=True)
class Communication:
    """Collectives of a group, as its communicator's clock has them.

    Attributes:
        calls, bytes: of one rank; see `tp.parallel.communicator.CommunicationStatistics`.
        seconds: inside them on each rank, in rank order, waiting for peers included.
    """

    calls: int
    bytes: int
    seconds: tuple[float, ...]

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> Communication:
        """From what `asdict` gave.

        Raises:
            KeyError, TypeError, ValueError: it came from something else.
        """
        return cls(int(fields["calls"]), int(fields["bytes"]), tuple(float(value) for value in fields["seconds"]))


@dataclass(frozen=True)
class DecodeAnswer:
    """What serving a request took.

    Attributes:
        ttft_ms: from the request to the moment when every sequence has its first token.
        tpot_ms: from then on, the time in which every sequence got one more token, the mean; 0 where each got but one.
        step_ms: from one token of a sequence to its next, the median; 0 where each got but one.
        tokens_per_s: tokens of all sequences a second, from then on; 0 where each got but one.
        new_ids: the new tokens of each sequence.
        prefill_communication, decode_communication: up to the first tokens, and from then on; None where the system
            does not tell, or has no ranks.
    """

    ttft_ms: float
    tpot_ms: float
    step_ms: float
    tokens_per_s: float
    new_ids: tuple[tuple[int, ...], ...]
    prefill_communication: Communication | None = None
    decode_communication: Communication | None = None

    def fields(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> DecodeAnswer:
        """The answer that `fields` came from.

        Raises:
            KeyError, TypeError, ValueError: they came from something else.
        """
        return cls(
            float(fields["ttft_ms"]),
            float(fields["tpot_ms"]),
            float(fields["step_ms"]),
            float(fields["tokens_per_s"]),
            tuple(tuple(int(token) for token in ids) for ids in fields["new_ids"]),
            *(_communication(fields.get(f"{phase}_communication")) for phase in ("prefill", "decode")),
        )


def random_request(batch: int, prompt_tokens: int, new_tokens: int, vocab_size: int, seed: int = 0) -> DecodeRequest:
    """Prompts of random ids, the same for the same arguments. All ids are below `vocab_size`."""
    draws = random.Random(seed)
    prompts = tuple(tuple(draws.randrange(vocab_size) for _ in range(prompt_tokens)) for _ in range(batch))
    return DecodeRequest(prompts, new_tokens)


def _communication(fields: Mapping[str, Any] | None) -> Communication | None:
    return None if fields is None else Communication.of_fields(fields)
