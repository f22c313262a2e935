"""Where files are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/tp-decoder where that is an absolute path, else ~/.cache/tp-decoder; it need not be there."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")) / "tp-decoder"
