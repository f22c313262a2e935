"""Every error a user can cause or meet, as a type of its own.

A message is one or two lines: what is wrong, where, the values, and what to do about it. What it quotes may come from a
hostile file: it is shown shortened, and without characters that a terminal would obey.
Commands print the message alone; ``--debug`` adds the traceback.
"""

LONGEST_MESSAGE = 1200
"""Characters; the middle of a longer message is left out."""


class TensorParallelError(Exception):
    """Base of all typed errors; `exit_code` is the status a command ends with."""

    exit_code = 1

    def __str__(self) -> str:
        return _printable(super().__str__())


class ConfigError(TensorParallelError, ValueError):
    """A model configuration that cannot be run: unknown family, bad size, unsupported field or degree."""

    exit_code = 3


class CheckpointError(TensorParallelError):
    """A checkpoint that is absent, incomplete, damaged, or does not match its configuration."""

    exit_code = 4


class CapacityError(TensorParallelError):
    """Weights, cache or request do not fit in the memory or context available."""

    exit_code = 5


class RequestError(TensorParallelError, ValueError):
    """A request that cannot be served: empty prompt, contradictory options, ids out of range."""

    exit_code = 2


class LayoutError(TensorParallelError, TypeError):
    """A tensor in one shard layout was given to something that needs another."""


class AutogradError(TensorParallelError, RuntimeError):
    """An operation that overwrites its operands was asked for where gradients need the old values."""


class CommunicationError(TensorParallelError):
    """Ranks that cannot form a group, or whose collectives do not match."""

    exit_code = 6


class LostPeerError(CommunicationError):
    """A collective cannot end: a peer's process has ended, or has left the group, or does not come in time."""


class RankFailedError(TensorParallelError):
    """A rank of this run raised or died; names the first one that did."""

    exit_code = 7


class NumericalError(TensorParallelError, ArithmeticError):
    """A loss or logits that are not finite: the run ends before they spread."""

    exit_code = 8


class BuildError(TensorParallelError):
    """The C++ kernels cannot be built: no compiler, or one that fails."""

    exit_code = 9


def first_line(error: BaseException) -> str:
    """What another library's error says, in one line, for a message of ours; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _printable(text: str) -> str:
    if len(text) > LONGEST_MESSAGE:
        kept = LONGEST_MESSAGE // 2
        text = f"{text[:kept]} ... {text[-kept:]}"
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
