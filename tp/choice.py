"""Which fast kernels may be used: all, but for those that the user switches off by name."""

from __future__ import annotations

import os
import warnings

DISABLE_VARIABLE = "TP_DECODER_DISABLE"
"""Environment variable: names of operations that use their plain form, separated by commas. Read at import."""

_disabled: frozenset[str] = frozenset()
_warned: set[tuple[str, str]] = set()


def _names(listed: str) -> frozenset[str]:
    return frozenset(name.strip() for name in listed.split(",") if name.strip())


def enabled(name: str) -> bool:
    """Whether the fast form of the operation `name` may be used."""
    return name not in _disabled


def disabled() -> frozenset[str]:
    """The operations that use their plain form because the user wants it."""
    return _disabled


def disable(names: str) -> None:
    """Switches off the operations in a comma-separated list, and on all others."""
    global _disabled
    _disabled = _names(names)


def warn_once(name: str, reason: str) -> None:
    """One warning in the life of a process that the operation `name` falls back to its plain form, and why."""
    if (name, reason) not in _warned:
        _warned.add((name, reason))
        warnings.warn(f"{name}: the plain form is used: {reason}", RuntimeWarning, stacklevel=2)


disable(os.environ.get(DISABLE_VARIABLE, ""))
