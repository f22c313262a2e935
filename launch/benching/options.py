"""The options of `bench`, and the sweep that they ask for; what cannot be measured is refused here, in one line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from launch.arguments import check_config, check_model, place, positive, seconds
from launch.benching.sweep import LAYOUTS, PHASES, SCALINGS, Form, Sweep, scaling_forms
from launch.measurement.command_line import integers, names
from launch.measurement.lineup import PEERS
from launch.measurement.peers import llama_cpp
from launch.output_files import check_directory, check_file
from tp.cores import own_cores
from tp.errors import RequestError

if TYPE_CHECKING:
    from tp.config import ModelConfig

DTYPES = ("bfloat16", "float16", "float32")
TRAINING_DTYPES = ("bfloat16", "float32")
SERVING_DTYPE = "bfloat16"
"""Where no dtype is asked for."""
TRAINING_DTYPE_ON = {"cpu": "float32", "cuda": "bfloat16"}
"""By device, as `train` has it."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """All of them."""
    _add_model_options(parser.add_argument_group("model"))
    _add_sweep_options(parser.add_argument_group("sweep (values between commas, all combined with all)"))
    _add_run_options(parser.add_argument_group("run"))
    _add_output_options(parser.add_argument_group("output"))


def sweep_of(arguments: argparse.Namespace, config: ModelConfig) -> Sweep:
    """The sweep that is asked for.

    Raises:
        RequestError: see the messages. ConfigError: a degree that the model does not have.
    """
    on_gpus = arguments.device == "cuda"
    degrees = arguments.tp or _default_degrees(arguments, config)
    config.check_degree(max(degrees))
    if on_gpus:
        _check_gpus(arguments, max(degrees))
    else:
        _check_threads(degrees, arguments.threads)
    sweep = Sweep(
        forms=tuple(scaling_forms(degrees, arguments.layouts, arguments.threads, on_gpus)),
        peers=tuple(_peer_forms(arguments.compare, degrees, arguments.threads)),
        phases=tuple(arguments.phases),
        scalings=tuple(arguments.scaling),
        dtypes=tuple(arguments.dtype or [SERVING_DTYPE]),
        training_dtypes=tuple(arguments.dtype or [TRAINING_DTYPE_ON[arguments.device]]),
        batches=tuple(arguments.batch),
        prompt_tokens=tuple(arguments.prompt_tokens),
        new_tokens=tuple(arguments.new_tokens),
        row_tokens=tuple(arguments.row_tokens or arguments.prompt_tokens),
    )
    _check_lengths(sweep, config.longest_context)
    return sweep


def check(arguments: argparse.Namespace) -> None:
    """Refuses what needs no model to be refused.

    Raises:
        RequestError, CheckpointError, ConfigError: see the messages.
    """
    if (arguments.model is None) == (arguments.config is None):
        raise RequestError("bench takes one of --model (a checkpoint) and --config (a config.json, random weights)")
    highest = max(arguments.tp or [1])
    if arguments.model is not None:
        check_model(arguments.model, highest)
    else:
        check_config(arguments.config, highest)
    if arguments.compare and arguments.config is not None:
        raise RequestError("--compare needs --model: other systems load a checkpoint, and --config has no weights")
    if arguments.gguf is not None and llama_cpp.NAME not in arguments.compare:
        raise RequestError(f"--gguf is what {llama_cpp.NAME} loads: it goes with --compare {llama_cpp.NAME}")
    if arguments.compare and arguments.device == "cuda":
        raise RequestError("--compare goes with --device cpu: the peers' environments are builds for CPUs")
    others = [name for name in arguments.dtype or () if name not in TRAINING_DTYPES]
    if "train" in arguments.phases and others:
        raise RequestError(f"--dtype {others[0]} cannot be trained in: leave train out of --phases")
    if "decode" in arguments.phases and min(arguments.new_tokens) < 2:
        raise RequestError("--new-tokens 1 leaves no time between tokens: decode needs at least 2")
    _check_files(arguments)


def _check_files(arguments: argparse.Namespace) -> None:
    if arguments.resume and arguments.json is None:
        raise RequestError("--resume needs --json FILE: the rows that it goes on with")
    for option, file in (("--json", arguments.json), ("--markdown", arguments.markdown)):
        if file is not None:
            check_file(option, file)
    for option, directory in (("--plots", arguments.plots), ("--profile", arguments.profile)):
        if directory is not None:
            check_directory(option, directory)


def _check_threads(degrees: Sequence[int], total: int) -> None:
    """The same total at every degree, and no more threads than cores: else unlike runs are compared."""
    cores = len(own_cores())
    if total > cores:
        raise RequestError(f"--threads {total} is more than the {cores} cores here: they would wait for each other")
    for t in degrees:
        if t > total:
            raise RequestError(
                f"--tp {t} needs a thread for each rank: --threads is {total}, and there are {cores} cores"
            )
        if total % t:
            raise RequestError(
                f"--tp {t} cannot have the {total} threads of t = 1: --threads must be a multiple of every degree"
            )


def _check_gpus(arguments: argparse.Namespace, highest: int) -> None:
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        raise RequestError("--device cuda: torch sees no CUDA device here")
    if highest > gpus:
        raise RequestError(f"--tp {highest} needs a GPU for each rank: there are {gpus}")


def _check_lengths(sweep: Sweep, longest: int) -> None:
    _, tokens = sweep.largest()
    if tokens > longest:
        raise RequestError(
            f"a sequence would come to {tokens} tokens, the model takes {longest}: shorten --prompt-tokens"
        )
    if sweep.longest_row() > longest:
        raise RequestError(
            f"a row would have {sweep.longest_row()} tokens, the model takes {longest}: shorten --row-tokens"
        )


def _default_degrees(arguments: argparse.Namespace, config: ModelConfig) -> list[int]:
    """Powers of two, as far as GPUs, or threads, and query heads go."""
    most = arguments.threads
    if arguments.device == "cuda":
        import torch

        most = torch.cuda.device_count()
    powers = [2**power for power in range(most.bit_length())]
    fitting = [t for t in powers if t <= config.num_attention_heads]
    return fitting if arguments.device == "cuda" else [t for t in fitting if most % t == 0]


def _peer_forms(peers: Sequence[str], degrees: Sequence[int], total: int) -> list[Form]:
    return [
        Form(name, t, total // t, t * (total // t))
        for name in peers
        for t in ([1] if name == llama_cpp.NAME else sorted({1, *degrees}))
    ]


def _some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of options that are names between commas."""

    def parse(text: str) -> list[str]:
        given = list(dict.fromkeys(names(text)))
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
        if not given:
            raise argparse.ArgumentTypeError(f"it is empty: give one or more of {', '.join(known)}")
        return given

    return parse


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", help="a directory in the Hub's layout, a Hub id, or a .gguf file")
    group.add_argument(
        "--config", type=place, metavar="FILE", help="instead: a config.json, filled with random weights"
    )
    group.add_argument("--gguf", metavar="FILE", help="the same model for --compare llama_cpp (default: MODEL.gguf)")


def _add_sweep_options(group: argparse._ArgumentGroup) -> None:
    some: dict[str, Any] = {"type": integers, "metavar": "N,..."}
    group.add_argument("--tp", type=integers, metavar="T,...", help="degrees beside t = 1 (default: powers of two)")
    group.add_argument("--layouts", type=_some_of(LAYOUTS), default=list(LAYOUTS), metavar="L,...",
                       help="of the residual stream: replicate,sharded (default both)")  # fmt: skip
    group.add_argument("--phases", type=_some_of(PHASES), default=list(PHASES), metavar="P,...",
                       help="prefill,decode,train (default all)")  # fmt: skip
    group.add_argument("--scaling", type=_some_of(SCALINGS), default=["strong"], metavar="S,...",
                       help="strong: the same work at every t (default); weak-batch, weak-tokens: t times as many, or "
                       "as long, sequences")  # fmt: skip
    group.add_argument("--dtype", type=_some_of(DTYPES), metavar="D,...",
                       help="bfloat16,float16,float32 (default bfloat16; train on CPUs: float32)")  # fmt: skip
    group.add_argument("--batch", default=[1], help="sequences at t = 1 (default 1)", **some)
    group.add_argument("--prompt-tokens", default=[128], help="of each, in prefill and decode (default 128)", **some)
    group.add_argument("--new-tokens", default=[32], help="of each, in decode (default 32)", **some)
    group.add_argument("--row-tokens", help="of each, in training (default: as --prompt-tokens)", **some)
    group.add_argument("--compare", type=_some_of(tuple(PEERS)), default=[], metavar="SYSTEM,...",
                       help=f"other systems, in the same rounds: {','.join(PEERS)} (see make peers)")  # fmt: skip


def _add_run_options(group: argparse._ArgumentGroup) -> None:
    cores = len(own_cores())
    group.add_argument("--threads", type=positive, default=cores, metavar="N", help="in all, at any t (default: cores)")
    group.add_argument("--runs", type=positive, default=5, metavar="N", help="rounds that count (default 5)")
    group.add_argument("--warm-ups", type=positive, default=1, metavar="N", help="rounds before them (default 1)")
    group.add_argument("--patience", type=seconds, default=600.0, metavar="S", help="for a load or a request (600 s)")
    group.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    group.add_argument("--backend", choices=["auto", "nccl", "gloo"], default="auto", help="auto: nccl on GPUs")


def _add_output_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", type=place, metavar="FILE", help="a line for each row, as soon as it is measured")
    group.add_argument("--resume", action="store_true", help="go on with the rows that are in the file of --json")
    group.add_argument("--markdown", type=place, metavar="FILE", help="the tables as Markdown")
    group.add_argument("--plots", type=place, metavar="DIRECTORY", help="speed-up, efficiency and times as PNG files")
    group.add_argument("--profile", type=place, metavar="DIRECTORY",
                       help="a Chrome trace of each rank, of each phase's first case")  # fmt: skip
    group.add_argument("--debug", action="store_true", help="tracebacks of all errors")
