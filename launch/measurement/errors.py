"""What goes wrong with one contestant, and is told beside the results of the others."""

from __future__ import annotations

from tp.errors import TensorParallelError


class ContestantError(TensorParallelError):
    """A contestant that is absent, does not start, ends, gives no answer, or gives one that makes no sense."""
