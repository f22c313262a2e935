"""`python -m launch.script script|module NAME ARGUMENTS...`: a user's script as a rank that reports how it fails."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.rank_process import as_rank
from tp.errors import RequestError


def main(argv: Sequence[str]) -> int:
    """Runs the script as `python NAME ARGUMENTS...` would."""
    kind, name, *rest = argv
    sys.argv = [name, *rest]
    if kind == "module":
        sys.path[0] = os.getcwd()
        return as_rank(lambda: _run_module(name))
    directory = Path(name).resolve().parent
    sys.path[0] = str(directory)
    return as_rank(lambda: _run_path(name), script_directory=directory)


def _run_module(name: str) -> int:
    if not _is_there(name):
        raise RequestError(f"there is no module {name}")
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


def _is_there(name: str) -> bool:
    try:
        return not name.startswith(".") and importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return False
        raise  # by a package that the module is in
    except ValueError:  # an empty name
        return False


def _run_path(name: str) -> int:
    runpy.run_path(name, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
