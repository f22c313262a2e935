"""Where `make peers` leaves the environments, or the reason that there is none."""

from __future__ import annotations

from pathlib import Path

from launch import ROOT
from launch.measurement.errors import ContestantError

HOME = ROOT / ".peers"


def interpreter(name: str, home: Path = HOME) -> str:
    """The interpreter of a peer's environment.

    Raises:
        ContestantError: it was not made, or could not be.
    """
    failed = home / f"{name}.failed"
    if failed.exists():
        raise ContestantError(f"make peers could not install it: {failed.read_text(encoding='utf-8').strip()}")
    if not (home / name / ".installed").exists():
        raise ContestantError(f"there is no environment .peers/{name}: make peers makes it")
    return str(home / name / "bin" / "python")
