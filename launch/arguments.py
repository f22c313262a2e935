"""Options that several commands share, and the checks that need neither torch nor a checkpoint's weights."""

from __future__ import annotations

import argparse
import ipaddress
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from launch.output_files import check_file
from tp.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    from tp.layers.layout import LayoutRule


LARGEST_COUNT = 10**15
"""Above anything that is counted here, bytes included."""
LONGEST_S = 1e6
"""Eleven days."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ours: one line, and raised."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message} (see {self.prog} --help)")


def positive(text: str) -> int:
    """The type of options that are counts.

    Raises:
        ArgumentTypeError: not an integer above 0, or one that is no count of anything.
    """
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    if value > LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {LARGEST_COUNT:.0e}, the most of any count")
    return value


def place(text: str) -> Path:
    """The type of options that are files or directories, which need not be there.

    Raises:
        ArgumentTypeError: a name that none can have.
    """
    try:
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no path: {getattr(error, 'strerror', error)}") from None
    return Path(text)


def output_file(text: str) -> Path:
    """The type of options that are files to write: tried while the command line is read, before anything is measured.

    Raises:
        ArgumentTypeError: one that could not be written later.
    """
    path = place(text)
    try:
        check_file("the file", path)
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def seconds(text: str) -> float:
    """The type of options that are durations.

    Raises:
        ArgumentTypeError: not a number above 0, or `LONGEST_S` and more.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0, and below {LONGEST_S:.0f}")
    return value


def address(text: str) -> str:
    """The type of options that are addresses of a machine.

    Raises:
        ArgumentTypeError: no IPv4 or IPv6 address.
    """
    try:
        ipaddress.ip_address(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no address such as 192.0.2.1 or fd00::1") from None
    return text


def token_ids(text: str) -> list[int]:
    """The type of options that are lists of token ids: "1,2,3".

    Raises:
        ArgumentTypeError: something else.
    """
    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from None
    if not ids or min(ids) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be one or more token ids, none negative, such as 1,2,3")
    return ids


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """What to run and in which numbers."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        help="a directory in the Hub's layout, a Hub id, or a .gguf file (default: SmolLM2-135M, fetched once; the "
        "small embedded model where it cannot be)",
    )
    group.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="auto: the checkpoint's own, bfloat16 for GGUF (default)",
    )
    group.add_argument(
        "--weights",
        choices=["plain", "int8"],
        default="plain",
        help="int8: rounded to 8 bits after loading, which halves what decode reads; plain: as --dtype says (default)",
    )
    group.add_argument("--max-context", type=positive, metavar="N", help="most tokens of a sequence, prompt included")


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """On how many ranks to run, and where."""
    group = parser.add_argument_group("ranks")
    group.add_argument("--tp", type=positive, metavar="T", help="ranks in all (default: the GPUs present, else 1)")
    group.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    group.add_argument("--backend", choices=["auto", "nccl", "gloo"], default="auto", help="auto: nccl on GPUs")
    group.add_argument(
        "--collective-timeout",
        type=seconds,
        default=60.0,
        metavar="S",
        help="how long ranks wait for one that does not come to a collective (60); loading does not count",
    )
    add_rendezvous_options(group)


def add_layout_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """How the residual stream lies over the ranks."""
    parser.add_argument(
        "--sequence-parallel",
        choices=["auto", "on", "off"],
        default="auto",
        help="ranks divide the tokens between matmuls; auto: in training and long prompts (default)",
    )


def layout_rule(choice: str) -> LayoutRule:
    """What `Decoder.choose_layout` is for a value of --sequence-parallel."""
    from tp.layers.layout import Replicate, ShardTokens, automatic_layout

    rules: dict[str, LayoutRule] = {"auto": automatic_layout, "on": ShardTokens, "off": Replicate}
    return rules[choice]


def add_rendezvous_options(group: argparse._ArgumentGroup) -> None:
    """The options of torchrun for several machines; every machine gets the same command."""
    group.add_argument("--nnodes", type=positive, default=1, metavar="N", help="machines that share the run")
    group.add_argument("--node-rank", type=int, metavar="R", help="this machine's number (static rendezvous)")
    group.add_argument("--rdzv-backend", choices=["c10d", "static"], default="c10d", help="how they do (c10d)")
    group.add_argument("--rdzv-endpoint", default="", metavar="HOST:PORT", help="where the machines meet")
    group.add_argument("--rdzv-id", default="", metavar="ID", help="a name of the run, the same on every machine")
    group.add_argument(
        "--local-addr",
        type=address,
        metavar="ADDRESS",
        help="this machine's address for the others (default: the one on the way to --rdzv-endpoint)",
    )


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """How results and errors are shown."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else there")
    group.add_argument("--debug", action="store_true", help="tracebacks of all errors, and what the libraries print")


def check_ranks(arguments: argparse.Namespace) -> None:
    """Refuses rank options that contradict each other.

    Raises:
        RequestError: see the messages.
    """
    if arguments.nnodes > 1 and not arguments.rdzv_endpoint:
        raise RequestError(f"--nnodes {arguments.nnodes} needs --rdzv-endpoint HOST:PORT, where the machines meet")
    if arguments.rdzv_backend == "static" and arguments.nnodes > 1 and arguments.node_rank is None:
        raise RequestError("--rdzv-backend static needs --node-rank on every machine")
    if arguments.node_rank is not None and not 0 <= arguments.node_rank < arguments.nnodes:
        raise RequestError(f"--node-rank {arguments.node_rank} is outside 0..{arguments.nnodes - 1} (--nnodes)")
    if getattr(arguments, "device", "auto") == "cpu" and arguments.backend == "nccl":
        raise RequestError("--backend nccl needs GPUs: it contradicts --device cpu")


def check_model(model: str, tp_size: int | None) -> None:
    """Refuses a model that is plainly not there, or has too few heads, before any rank is started.

    Only what is certain without reading much; everything else is said when the checkpoint is opened.

    Raises:
        CheckpointError: a path that does not exist, or a directory that is not a checkpoint.
        ConfigError: an unknown family, or more ranks than query heads.
    """
    try:
        path = Path(model).expanduser()
        there = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, an unknown user, a NUL
        raise CheckpointError(f"--model {model[:80]}: {error}") from error
    if not there:
        if path.is_absolute() or model.startswith((".", "~")) or model.endswith(".gguf"):
            raise CheckpointError(f"--model {model}: there is no such file or directory")
        return
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"--model {model} is not a checkpoint: the directory has no config.json")
        check_config(path / "config.json", tp_size)
    elif (tp_size or 1) > 1:
        _check_gguf(path, tp_size or 1)


def _check_gguf(path: Path, tp_size: int) -> None:
    """As `check_config`, of a file's header."""
    from tp.checkpoint.gguf_header import GgufHeader
    from tp.checkpoint.settings import read_model_config

    metadata = GgufHeader.read(path).metadata
    heads = metadata.get(f"{metadata.get('general.architecture')}.attention.head_count")
    if not isinstance(heads, int) or tp_size > heads:
        read_model_config(str(path)).check_degree(tp_size)


def check_config(path: Path, tp_size: int | None) -> None:
    """Looks at two fields; the whole check, which takes seconds to import, only to say what is wrong with them.

    Raises:
        CheckpointError: the file cannot be read. ConfigError: an unknown family, or more ranks than query heads.
    """
    from tp.config import ModelConfig
    from tp.families import FAMILIES
    from tp.json_objects import read_object

    fields = read_object(path, CheckpointError)
    heads = fields.get("num_attention_heads")
    if str(fields.get("model_type")) not in FAMILIES or (isinstance(heads, int) and (tp_size or 1) > heads):
        ModelConfig.from_hf(fields).check_degree(tp_size or 1)
