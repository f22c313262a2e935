"""JSON that others wrote: read within limits, and made a dataclass only where every value has its field's type."""

from __future__ import annotations

import json
import types
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tp.errors import TensorParallelError

T = TypeVar("T")

LARGEST_BYTES = 100_000_000
"""Of a file, or of a header, of JSON; the largest real ones, indexes and headers of thousands of tensors, have a few
million."""
MOST_VALUES = 2**21
"""Of a text of JSON, by its commas and brackets; as objects of Python each takes up to a hundred times its bytes."""
DEEPEST = 32
"""Lists and objects within each other; real ones have five."""
LARGEST_INTEGER = 2**63


def read_object(path: Path, failure: type[TensorParallelError]) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        `failure`: it is not there, no regular file, too large, or holds something else.
    """
    try:
        if path.exists() and not path.is_file():
            raise failure(f"{path} cannot be read: it is not a regular file")
        if path.stat().st_size > LARGEST_BYTES:
            raise failure(f"{path} has {path.stat().st_size} bytes: JSON of more than {LARGEST_BYTES} is not read")
        content = parse(path.read_bytes())
    except OSError as error:
        raise failure(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise failure(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise failure(f"{path} holds a {type(content).__name__}, not a JSON object")
    return content


def parse(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON in UTF-8, has more than `MOST_VALUES` values, is nested deeper than `DEEPEST`, or an
            object has two values of one name, of which readers take either.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        if sum(map(text.count, ",[{")) > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES} values")
        content = json.loads(text, object_pairs_hook=_with_names_once, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError("lists within lists, too deep to be read") from error
    level = [content]
    for _ in range(DEEPEST):
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return content
    raise ValueError(f"lists within lists, more than {DEEPEST} deep")


def typed(kind: type[T], value: Any, place: str = "it") -> T:
    """A dataclass from the JSON object of its fields, each value of the type that the field has.

    Fields are numbers (finite, integers below 2^63), strings, booleans, literals, None, sequences, mappings, and
    dataclasses of these.

    Args:
        place: what the object is called in messages.

    Raises:
        ValueError: a field that is missing, unknown or of another type, by its place.
    """
    result: T = _typed(kind, value, place)
    return result


def _typed(kind: Any, value: Any, place: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _of_union(arguments, value, place)
    if origin is Literal:
        return _require(isinstance(value, str) and value in arguments, value, place, " or ".join(map(repr, arguments)))
    if is_dataclass(kind):
        return _of_fields(kind, value, place)
    if origin is tuple and arguments[-1] is not Ellipsis:
        _require(isinstance(value, Sequence) and len(value) == len(arguments), value, place, f"{len(arguments)} values")
        return tuple(_typed(inner, each, place) for inner, each in zip(arguments, value, strict=True))
    if origin in (tuple, Sequence):
        _require(isinstance(value, (list, tuple)), value, place, "a list")
        return tuple(_typed(arguments[0], each, f"{place}[{at}]") for at, each in enumerate(value))
    if origin is Mapping:
        _require(isinstance(value, Mapping), value, place, "an object")
        numbered = arguments[0] is int
        for name in value:
            _require(not numbered or (name.isascii() and name.isdecimal()), name, f"{place}: a name", "a whole number")
        return {
            (int(name) if numbered else name): _typed(arguments[1], each, f"{place}.{name}")
            for name, each in value.items()
        }
    return _scalar(kind, value, place)


def _scalar(kind: Any, value: Any, place: str) -> Any:
    if kind is int:
        whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST_INTEGER
        return _require(whole, value, place, "an integer")
    if kind is float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(_require(number and abs(value) < 1e30, value, place, "a number"))
    return _require(isinstance(value, kind), value, place, f"of type {kind.__name__}")


def _of_union(kinds: Sequence[Any], value: Any, place: str) -> Any:
    """Of a type or None."""
    if value is None and types.NoneType in kinds:
        return None
    (kind,) = [kind for kind in kinds if kind is not types.NoneType]
    return _typed(kind, value, place)


def _of_fields(kind: Any, value: Any, place: str) -> Any:
    _require(isinstance(value, Mapping), value, place, "an object")
    hints = get_type_hints(kind)
    if unknown := sorted(value.keys() - {field.name for field in fields(kind)}):
        raise ValueError(f"{place} has an unknown field {unknown[0]!r}")
    for field in fields(kind):
        if field.name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{place} has no {field.name}")
    return kind(**{name: _typed(hints[name], each, f"{place}.{name}") for name, each in value.items()})


def _require(holds: bool, value: Any, place: str, expected: str) -> Any:
    if not holds:
        raise ValueError(f"{place} is {value!r}: it must be {expected}")
    return value


def _with_names_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} is there twice")
    return content


def _no_number(name: str) -> float:
    """For NaN and the infinities, which only Python writes as numbers."""
    raise ValueError(f"{name} is no number of JSON")


def _inside(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()
