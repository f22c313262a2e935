"""Ranks that were started or called differently are told so, by name, before they compute together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tp.errors import CommunicationError

LONGEST_VALUE = 60
"""Characters of a value that a message shows; what must be told apart beyond that is compared by a digest."""

Told = Mapping[str, str | None]
"""What a rank believes, by name. None, or no entry: it goes along with the others."""


def check_alike(gather: Callable[[Any], list[Any]], told: Told) -> None:
    """Compares what every rank believes. Every rank calls it.

    Args:
        gather: an exchange of objects within the group.

    Raises:
        CommunicationError: as `compare`.
    """
    compare(gather(told))


def compare(told_by_rank: Sequence[Told]) -> None:
    """The same on every rank, from what all of them told.

    Raises:
        CommunicationError: names the first entry that differs, its values, and which ranks have which.
    """
    for name in dict.fromkeys(name for told in told_by_rank for name in told):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, told in enumerate(told_by_rank):
            if (value := told.get(name)) is not None:
                ranks_by_value.setdefault(value, []).append(rank)
        if len(ranks_by_value) > 1:
            values = "; ".join(f"{_listed(ranks)}: {_shortened(value)}" for value, ranks in ranks_by_value.items())
            raise CommunicationError(f"the ranks differ in {name}, {values}: start and call all of them alike")


def told_of(prefix: str, fields: Any) -> dict[str, str]:
    """The fields of a dataclass, those of dataclasses in it by themselves."""
    told: dict[str, str] = {}
    for field in dataclasses.fields(fields):
        value, name = getattr(fields, field.name), f"{prefix} {field.name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            told.update(told_of(name, value))
        else:
            told[name] = str(value)
    return told


def _listed(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _shortened(value: str) -> str:
    return value if len(value) <= LONGEST_VALUE else value[: LONGEST_VALUE - 1] + "…"
