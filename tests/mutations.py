"""Damage to files, drawn from a seed: to bytes, to JSON, and to what stands for a number."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

HOSTILE_INTEGERS = (0, 1, 2, 3, 7, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
HOSTILE_VALUES: tuple[Any, ...] = (
    *HOSTILE_INTEGERS, -1, -(2**31), -(2**63), 10**30, 10**400, True, False, None, 0.5, -0.0, 2.0, 1e-320, 1e308,
    float("inf"), float("-inf"), float("nan"), "", "0", "12", "F32", "..", "a/../b", "/", "x" * 10_000,
    "\x1b[31m\n\u2028", "\ud800", [], {}, [[]], [None], [1, 2], {"a": 1}, "DEEP", "DEEPER",
)  # fmt: skip
"""What takes a value's place in JSON; the last two stand for lists within lists, see `_dump`."""

_DEPTHS = {'"DEEP"': 900, '"DEEPER"': 100_000}


def mutated_json(content: Any, draw: random.Random) -> bytes:
    """The text of a JSON value after one to three changes of its tree, or of its text."""
    tree = json.loads(json.dumps(content))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        tree = _changed(tree, draw)
    text = _dump(tree)
    if draw.random() < 0.08:
        text = _with_a_name_twice(text, draw)
    data = text.encode("utf-8", "surrogatepass")
    return mutated_bytes(data, draw, len(data)) if draw.random() < 0.1 else data


def mutated_bytes(data: bytes, draw: random.Random, header: int) -> bytes:
    """One to three changes, most of them within the first `header` bytes."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        end = min(len(data), header if draw.random() < 0.9 else len(data))
        position = draw.randrange(max(1, end))
        data = draw.choice(_BYTE_CHANGES)(data, position, draw)
    return data


def _changed(tree: Any, draw: random.Random) -> Any:
    """The tree with one of its nodes replaced, removed, doubled, or exchanged with its neighbour."""
    places = list(_places(tree))
    if not places:
        return _hostile(draw)
    if draw.random() < 0.02:
        return _hostile(draw)
    parent, key = draw.choice(places)
    change = draw.random()
    if change < 0.6:
        parent[key] = _hostile(draw)
    elif change < 0.75 and isinstance(parent[key], (int, float)) and abs(parent[key]) < 1e300:
        parent[key] = draw.choice((parent[key] + 1, -parent[key], parent[key] * 2, parent[key] * 0.5))
    elif change < 0.85:
        del parent[key]
    elif change < 0.95:
        _, other = draw.choice([place for place in places if place[0] is parent])
        parent[key], parent[other] = parent[other], parent[key]
    elif isinstance(parent, dict):
        parent[f"{key}{draw.choice(('', '2', ' ', chr(0)))}_"] = copy.deepcopy(parent[key])
    else:
        parent.insert(key, copy.deepcopy(parent[key]))
    return tree


def _hostile(draw: random.Random) -> Any:
    return copy.deepcopy(draw.choice(HOSTILE_VALUES))


def _places(tree: Any) -> Any:
    if isinstance(tree, (dict, list)):
        for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            yield from _places(tree[key])


def _dump(tree: Any) -> str:
    text = json.dumps(tree)
    for mark, depth in _DEPTHS.items():
        text = text.replace(mark, "[" * depth + "]" * depth)
    return text


def _with_a_name_twice(text: str, draw: random.Random) -> str:
    """The first name of an object once more at its end, where a reader may take either."""
    if not text.startswith("{") or len(text) < 3:
        return text
    name = text[1 : text.index(":")] if ":" in text else '"a"'
    return f"{text[:-1]}, {name}: {draw.choice(('null', '1', '{}', '[0, 4]'))}}}"


def _flip(data: bytes, position: int, draw: random.Random) -> bytes:
    changed = bytearray(data or b"\0")
    changed[position % len(changed)] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _overwrite(data: bytes, position: int, draw: random.Random) -> bytes:
    width = draw.choice((1, 2, 4, 8))
    number = draw.choice(HOSTILE_INTEGERS) % 256**width
    return data[:position] + number.to_bytes(width, "little") + data[position + width :]


def _nudge(data: bytes, position: int, draw: random.Random) -> bytes:
    number = int.from_bytes(data[position : position + 8].ljust(8, b"\0"), "little") + draw.choice((-32, -1, 1, 32))
    return data[:position] + (number % 2**64).to_bytes(8, "little") + data[position + 8 :]


def _cut(data: bytes, position: int, draw: random.Random) -> bytes:
    return data[:position]


def _remove(data: bytes, position: int, draw: random.Random) -> bytes:
    return data[:position] + data[position + draw.choice((1, 4, 8, 30)) :]


def _repeat(data: bytes, position: int, draw: random.Random) -> bytes:
    length = draw.choice((1, 4, 8, 64))
    return data[: position + length] + data[position : position + length] + data[position + length :]


def _clear(data: bytes, position: int, draw: random.Random) -> bytes:
    length = draw.choice((1, 8, 64, 4096))
    return data[:position] + bytes(len(data[position : position + length])) + data[position + length :]


def _append(data: bytes, position: int, draw: random.Random) -> bytes:
    return data + bytes(draw.choice((1, 32, 1000)))


_BYTE_CHANGES: tuple[Callable[[bytes, int, random.Random], bytes], ...] = (
    _flip, _flip, _overwrite, _overwrite, _overwrite, _nudge, _nudge, _cut, _remove, _repeat, _clear, _append,
)  # fmt: skip
