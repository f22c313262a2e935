"""`run`: starts any script that torchrun could start, and ends all its ranks when one of them fails."""

from __future__ import annotations

import argparse
import os
from typing import Any

from launch.arguments import add_rendezvous_options, check_ranks, positive
from tp.errors import RequestError

DESCRIPTION = "Starts any script that torchrun could start, and ends all its ranks when one of them fails."


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "run", help="start a script on several ranks, as torchrun does", description=DESCRIPTION
    )
    parser.add_argument(
        "--nproc", "--nproc-per-node", type=positive, required=True, metavar="N", help="ranks on this machine"
    )
    add_rendezvous_options(parser)
    parser.add_argument("--debug", action="store_true", help="also what the launcher and the libraries log")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("script_arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Starts the ranks and waits for them."""
    from launch.ranks import Placement, start

    check_ranks(arguments)
    if not arguments.module and not os.path.isfile(arguments.script):
        raise RequestError(f"there is no script {arguments.script}")
    kind = "module" if arguments.module else "script"
    command = ["-m", "launch.script", kind, arguments.script, *arguments.script_arguments]
    return start(command, Placement.of(arguments.nproc, arguments), debug=arguments.debug)
