"""Prints what an installed distribution requires on this machine, one requirement a line, some left out.

python benchmarks/peers/requirements_of.py DISTRIBUTION [--without NAME ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from importlib.metadata import requires

from packaging.requirements import Requirement


def requirements(distribution: str, without: Collection[str]) -> Iterator[str]:
    """Requirements whose markers hold here, extras apart, without those of the given names."""
    for text in requires(distribution) or ():
        requirement = Requirement(text)
        holds = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if holds and requirement.name not in without:
            requirement.marker = None
            yield str(requirement)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("distribution")
    parser.add_argument("--without", nargs="*", default=[], metavar="NAME")
    arguments = parser.parse_args()
    print("\n".join(requirements(arguments.distribution, arguments.without)))


if __name__ == "__main__":
    main()
