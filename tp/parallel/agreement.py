"""Ranks that were started or called differently are told so, by name, before they compute together."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tp.errors import CommunicationError

if TYPE_CHECKING:
    from tp.parallel.communicator import Communicator

LONGEST_VALUE = 60
"""Characters of a value that a message shows whole."""

Statement = Mapping[str, str | None]
"""What a rank believes, by name. None, or no entry: it goes along with the others."""


def check_alike(communicator: Communicator, statement: Statement) -> None:
    """Compares what every rank of a group believes. Every rank calls it.

    Raises:
        CommunicationError: as `compare`.
    """
    compare(communicator.global_ranks, communicator.all_gather_object(statement))


def compare(ranks: Sequence[int], statements: Sequence[Statement]) -> None:
    """The same on every rank, from the statements of all of them.

    Args:
        ranks: their numbers in the run, by which users know them.

    Raises:
        CommunicationError: names the first entry that differs, its values, and which ranks have which.
    """
    for name in dict.fromkeys(name for statement in statements for name in statement):
        ranks_by_value = _grouped(ranks, [statement.get(name) for statement in statements])
        if len(ranks_by_value) > 1:
            values = _phrased({in_short(value, LONGEST_VALUE): ranks for value, ranks in ranks_by_value.items()})
            raise CommunicationError(f"the ranks differ in {name}, {values}: start and call all of them alike")


def different_collectives(ranks: Sequence[int], announced: Sequence[str]) -> CommunicationError:
    """What to raise, the same on every rank, where collectives do not match.

    Args:
        ranks: as in `compare`.
        announced: what each of them says that it is in; alike where the difference does not show in it.
    """
    ranks_by_text = _grouped(ranks, announced)
    if len(ranks_by_text) == 1:
        return CommunicationError(
            f"the ranks are in {announced[0]}, but with other shapes or sizes: give all of them the same"
        )
    return CommunicationError(
        f"the ranks are in different collectives, {_phrased(ranks_by_text)}: call the same ones, in the same order, on "
        "all ranks"
    )


def first_refusal(refusals: Sequence[str | None]) -> str | None:
    """The first that says why, else one that does not ("", where nobody need be told); None where no rank refuses."""
    return next(filter(None, refusals), "" if "" in refusals else None)


def statement_of(prefix: str, fields: Any) -> dict[str, str]:
    """The fields of a dataclass, those of dataclasses in it by themselves."""
    statement: dict[str, str] = {}
    for field in dataclasses.fields(fields):
        value, name = getattr(fields, field.name), f"{prefix} {field.name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            statement.update(statement_of(name, value))
        else:
            statement[name] = str(value)
    return statement


def in_short(text: str, shown: int) -> str:
    """The text, or so many characters of it and a digest, by which two that begin alike are told apart."""
    if len(text) <= shown:
        return text
    return f"{text[:shown]}… (digest {zlib.crc32(text.encode(errors='surrogatepass')):08x})"


def _grouped(ranks: Sequence[int], values: Sequence[str | None]) -> dict[str, list[int]]:
    """The ranks that have each value; those without one are left out."""
    ranks_by_value: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        if value is not None:
            ranks_by_value.setdefault(value, []).append(rank)
    return ranks_by_value


def _phrased(ranks_by_value: Mapping[str, Sequence[int]]) -> str:
    return "; ".join(f"{_listed(ranks)}: {value}" for value, ranks in ranks_by_value.items())


def _listed(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
