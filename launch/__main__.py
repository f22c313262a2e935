"""`python -m launch COMMAND`, `tp-decoder COMMAND`, or a rank of either, or of torchrun."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence

import tp
from launch import bench, convert, demo, generate, info, inspect, plan, run, score, train
from launch.arguments import Parser
from launch.rank_process import as_rank, is_rank, leave, mute_unless_first
from launch.terminal import Terminal, open_closed_streams
from tp.choice import disabled
from tp.errors import RankFailedError, RequestError, TensorParallelError

DESCRIPTION = "Runs a language model split over any number of ranks: the same text at every degree."
EPILOG = """\
Every command works the same in two ways:
  tp-decoder generate --tp 4 --model M ...               starts its own 4 ranks
  torchrun --nproc-per-node 4 -m launch generate --model M ...

exit status:
  0 done                      4 checkpoint missing or damaged    8 a loss or logits not finite
  1 a script's use of layers  5 not enough memory or context     9 C++ kernels not built
  2 command or request        6 ranks cannot communicate         130 interrupted (128 + signal)
  3 model configuration       7 a rank failed
"""


def build_parser() -> Parser:
    """All commands and their options."""
    parser = Parser(prog="tp-decoder", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"tp-decoder {tp.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in (generate, score, inspect, train, bench, convert, plan, run, info, demo):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status; what went wrong is one or two lines on stderr.

    A rank that fails does not come back here: see `launch.rank_process.as_rank`.
    """
    open_closed_streams()
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if is_rank():
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once, also while waiting in a collective
            leave(as_rank(lambda: _execute(argv), debug="--debug" in argv))
        return _execute(argv)
    except TensorParallelError as error:
        if "--debug" in argv:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever reads our output has seen enough
        Terminal.of_process().abandon()
        return 0
    except Exception:
        traceback.print_exc()
        return RankFailedError.exit_code


def _execute(argv: list[str]) -> int:
    if is_rank():
        mute_unless_first("--debug" in argv)
    arguments = build_parser().parse_args(argv)
    arguments.argv = argv
    disabled()  # refuses a mistyped name, whichever the command
    try:
        status: int = arguments.execute(arguments)
    except OSError as error:
        if error.filename is None:  # of no place: a pipe that nobody reads, no memory
            raise
        raise RequestError(f"{error.filename} cannot be used: {error.strerror}") from error
    return status


if __name__ == "__main__":
    sys.exit(main())
