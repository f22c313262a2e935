"""Which fast kernels may be used: all, but for those that the user switches off by name."""

from __future__ import annotations

import os
import warnings

from tp.errors import RequestError

DISABLE_VARIABLE = "TP_DECODER_DISABLE"
"""Environment variable: names of operations that use their plain form, separated by commas. Read when first needed."""

OPERATIONS = (
    "argmax_and_sum_exp",
    "cache_attention",
    "core_binding",
    "cross_entropy",
    "decode_attention",
    "decode_graphs",
    "embedding_lookup",
    "fused_add_rms_norm",
    "int8_linear",
    "native",
    "native_gemm",
    "native_linear",
    "native_rms_norm",
    "overlapped_linear",
    "prefill_attention",
    "reduce_add_rms_norm",
    "rms_norm",
    "rotary",
    "shared_memory",
    "silu_and_mul",
    "symmetric_memory",
    "upcast_matmul",
)
"""All names; docs/architecture.md tells what each is."""

_disabled: frozenset[str] | None = None  # None: the variable has not been read
_warned: set[tuple[str, str]] = set()


def enabled(name: str) -> bool:
    """Whether the fast form of the operation `name` may be used.

    Args:
        name: one of `OPERATIONS`.

    Raises:
        RequestError: as `disabled`.
    """
    assert name in OPERATIONS, f"{name!r} is missing in tp.choice.OPERATIONS"
    return name not in disabled()


def disabled() -> frozenset[str]:
    """The operations that use their plain form because the user wants it.

    Raises:
        RequestError: the environment variable names something else.
    """
    if _disabled is None:
        disable(os.environ.get(DISABLE_VARIABLE, ""))
    assert _disabled is not None
    return _disabled


def disable(names: str) -> None:
    """Switches off the operations in a comma-separated list, and on all others, from their next call on.

    Communicators and captured decode steps that exist already stay as they are.

    Raises:
        RequestError: a name that is not one of `OPERATIONS`; nothing is changed.
    """
    global _disabled
    listed = frozenset(name.strip() for name in names.split(",") if name.strip())
    if unknown := sorted(listed.difference(OPERATIONS)):
        raise RequestError(f"{DISABLE_VARIABLE} knows no {', '.join(unknown)}: its names are {', '.join(OPERATIONS)}")
    _disabled = listed


def warn_once(name: str, reason: str) -> None:
    """One warning in the life of a process that the operation `name` falls back to its plain form, and why."""
    if (name, reason) not in _warned:
        _warned.add((name, reason))
        warnings.warn(f"{name}: the plain form is used: {reason}", RuntimeWarning, stacklevel=2)
