"""Files that are no Python go into an installed package only where pyproject.toml names them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def files(directory: Path) -> set[Path]:
    return {path for path in directory.rglob("*") if path.is_file() and path.parent.name != "__pycache__"}


@pytest.mark.parametrize("package", ["tp", "launch"])
def test_every_file_is_installed(package: str) -> None:
    found = files(ROOT / package)
    installed = {path for path in found if path.suffix == ".py"}
    for pattern in SETUPTOOLS["package-data"][package]:
        named = set((ROOT / package).glob(pattern))
        assert named, f"{pattern} names nothing"
        installed |= named
    assert sorted(str(path.relative_to(ROOT)) for path in found - installed) == []
