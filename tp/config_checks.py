"""What values of a config are refused; each check raises a `ConfigError` that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tp.errors import ConfigError

LARGEST_COUNT = 2**31
"""Above any size of a model; what is larger is damage, and would overflow in torch."""
LARGEST: Mapping[str, int] = {
    "num_layers": 4096,
    "num_attention_heads": 2**16,
    "num_kv_heads": 2**16,
    "head_dim": 2**16,
}
"""Of what is gone through one by one, or takes memory before it is known what fits."""


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """`value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{name} {value!r} is not supported: choose from {', '.join(choices)}")


def check_positive(prefix: str = "", **values: float | None) -> None:
    """Each value is a finite number above 0, or None."""
    for name, value in values.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < float("inf")):
            raise ConfigError(f"{prefix}{name} is {value!r}: it must be a positive number")


def check_counts(prefix: str = "", **values: Any) -> None:
    """Each value is a whole number above 0, and not larger than `LARGEST` allows."""
    for name, value in values.items():
        largest = LARGEST.get(name, LARGEST_COUNT - 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= largest:
            limit = f"of at most {largest}" if name in LARGEST else "below 2^31"
            raise ConfigError(f"{prefix}{name} is {value!r}: it must be a positive integer {limit}")
