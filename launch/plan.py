"""`plan`: what a model takes and how fast it is on machines that are not here; or measures this one."""

from __future__ import annotations

import argparse
import io
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.arguments import add_layout_option, add_output_options, place, positive
from launch.output_files import check_file, write
from launch.planning.degrees import Degrees
from launch.terminal import Terminal
from tp.defaults import PREFILL_CHUNK
from tp.errors import CapacityError, RequestError
from tp.planning.hardware import profile_names

if TYPE_CHECKING:
    from rich.console import Console

    from tp.planning.plan import ServingPlan, TrainingPlan, Workload

DESCRIPTION = """\
What a model takes on each rank and how fast it would be: at every degree, on hardware that need not be here. No weights
are read. With --calibrate, measures this machine and writes its profile."""
USUAL_CONTEXT = 4096
MOST_NODES = MOST_SEQUENCES = MOST_STEPS = 2**16
TABLE_WIDTH = 140
"""Of tables that are not for a terminal."""
SHARDED = {"auto": None, "on": True, "off": False}


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser("plan", help="memory and speed on hardware that is not here", description=DESCRIPTION)
    parser.add_argument("--model", help="a directory in the Hub's layout, a config.json, a .gguf file or a Hub id")
    parser.add_argument(
        "--hardware", metavar="NAME|FILE", help=f"a file of --calibrate, or one of {', '.join(profile_names())}"
    )
    parser.add_argument("--nodes", type=positive, default=1, metavar="N", help="machines of that kind (default 1)")
    parser.add_argument(
        "--tp",
        type=Degrees.parse,
        metavar="T",
        help="degrees: 4, 1,2,4 or 1-8 (default: powers of two up to all ranks; with --calibrate 1,2)",
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="auto: the checkpoint's own, bfloat16 for GGUF (default)",
    )
    parser.add_argument("--weights", choices=["plain", "int8"], default="plain", help="int8: of 8 bits, to serve only")
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="sequences at once (default 1)")
    parser.add_argument("--context", type=positive, metavar="N", help="tokens of each (default 4096, or the model's)")
    step = "prompt tokens a step (default %(default)s)"
    parser.add_argument("--prefill-chunk", type=positive, default=PREFILL_CHUNK, metavar="N", help=step)
    parser.add_argument("--train", action="store_true", help="plans training steps of --batch rows instead of serving")
    parser.add_argument("--activation-checkpointing", action="store_true", help="layers are computed again (--train)")
    add_layout_option(parser)
    parser.add_argument("--plot", type=place, metavar="FILE", help="tokens a second against ranks, as PNG")
    measuring = parser.add_argument_group("measuring this machine")
    measuring.add_argument("--calibrate", action="store_true", help="measures this machine; takes minutes")
    measuring.add_argument("--out", type=place, metavar="FILE", help="where its profile goes")
    add_output_options(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Plans, or measures, in this process."""
    _check(arguments)
    with Terminal.of_command(json=arguments.json) as terminal:
        _run(arguments, terminal)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """What can be refused before a model is read or anything is measured."""
    _check_calibration(arguments) if arguments.calibrate else _check_plan(arguments)
    for option, file in (("--out", arguments.out), ("--plot", arguments.plot)):
        if file is not None:
            check_file(option, file)


def _check_calibration(arguments: argparse.Namespace) -> None:
    if arguments.out is None:
        raise RequestError("--calibrate needs --out FILE, where the profile goes")
    if arguments.model or arguments.hardware:
        raise RequestError("--calibrate measures this machine: it takes no --model and no --hardware")
    if arguments.plot:
        raise RequestError("--plot goes with a plan: --calibrate has nothing to draw")


def _check_plan(arguments: argparse.Namespace) -> None:
    if arguments.out is not None:
        raise RequestError("--out goes with --calibrate; --json and --plot show a plan")
    if not arguments.model:
        raise RequestError("--model is missing: a directory, a config.json, a .gguf file or a Hub id")
    if not arguments.hardware:
        raise RequestError(f"--hardware is missing: a file, or one of {', '.join(profile_names())}")
    if arguments.train and arguments.weights != "plain":
        raise RequestError("--train and --weights int8 contradict each other: int8 weights are for serving only")
    if arguments.activation_checkpointing and not arguments.train:
        raise RequestError("--activation-checkpointing needs --train")


def _run(arguments: argparse.Namespace, terminal: Terminal) -> None:
    if arguments.calibrate:
        from launch.planning.calibration import calibrate

        calibrate(arguments, terminal)
        return
    workload = _workload(arguments)
    _plan_training(arguments, workload, terminal) if arguments.train else _plan_serving(arguments, workload, terminal)


def _workload(arguments: argparse.Namespace) -> Workload:
    from tp.checkpoint.settings import read_model_config
    from tp.planning.hardware import load_profile
    from tp.planning.plan import Workload
    from tp.planning.precision import Precision

    profile = load_profile(arguments.hardware)
    config = read_model_config(arguments.model)
    dtype = (config.dtype or "bfloat16") if arguments.dtype == "auto" else arguments.dtype
    workload = Workload(
        config=config,
        precision=Precision.of(dtype, arguments.weights),
        profile=profile,
        nodes=arguments.nodes,
        batch=arguments.batch,
        context=arguments.context or min(USUAL_CONTEXT, config.longest_context),
        chunk=arguments.prefill_chunk,
        sharded=SHARDED[arguments.sequence_parallel],
        recomputed=arguments.activation_checkpointing,
    )
    _check_amount(workload)
    return workload


def _check_amount(workload: Workload) -> None:
    """Refuses what would take longer to plan than to buy: nodes and sequences are gone through one by one."""
    for name, value, most in (("nodes", workload.nodes, MOST_NODES), ("batch", workload.batch, MOST_SEQUENCES)):
        if value > most:
            raise RequestError(f"--{name} {value} is more than {most}, which no plan is made for")


def _check_steps(workload: Workload) -> None:
    """So are steps of a prefill."""
    if workload.batch * workload.context > MOST_STEPS * workload.chunk:
        raise RequestError(
            f"--prefill-chunk {workload.chunk} would cut {workload.batch} x {workload.context} prompt tokens into more "
            f"than {MOST_STEPS} steps: give a larger one"
        )


def _plan_serving(arguments: argparse.Namespace, workload: Workload, terminal: Terminal) -> None:
    from launch.planning.content import serving_content
    from launch.planning.tables import print_serving
    from tp.planning.plan import plan_serving

    _check_steps(workload)
    plans = [plan_serving(workload, degree) for degree in _degrees(arguments, workload)]
    if arguments.json:
        terminal.show(json.dumps(serving_content(arguments.model, workload, plans)) + "\n")
    else:
        _show(terminal, lambda console: print_serving(console, arguments.model, workload, plans))
    if arguments.plot:
        _plot(
            arguments, workload, "decode", {plan.tp_size: workload.batch / plan.decode.seconds for plan in plans}, plans
        )
    _refuse_if_nothing_fits(plans)


def _plan_training(arguments: argparse.Namespace, workload: Workload, terminal: Terminal) -> None:
    from launch.planning.content import training_content
    from launch.planning.tables import print_training
    from tp.planning.plan import plan_training

    plans = [plan_training(workload, degree) for degree in _degrees(arguments, workload)]
    if arguments.json:
        terminal.show(json.dumps(training_content(arguments.model, workload, plans)) + "\n")
    else:
        _show(terminal, lambda console: print_training(console, arguments.model, workload, plans))
    if arguments.plot:
        tokens = workload.batch * workload.context
        _plot(arguments, workload, "training", {plan.tp_size: tokens / plan.step.seconds for plan in plans}, plans)
    _refuse_if_nothing_fits(plans)


def _degrees(arguments: argparse.Namespace, workload: Workload) -> list[int]:
    from launch.planning.degrees import usual_degrees

    return arguments.tp.on(workload) if arguments.tp else usual_degrees(workload)


def _show(terminal: Terminal, render: Callable[[Console], None]) -> None:
    """Tables on stdout, as wide as the terminal where there is one."""
    from rich.console import Console

    width = shutil.get_terminal_size().columns if terminal.out.isatty() else TABLE_WIDTH
    text = io.StringIO()
    render(Console(file=text, width=width, highlight=False, force_terminal=terminal.out.isatty()))
    terminal.show(text.getvalue())


def _plot(
    arguments: argparse.Namespace,
    workload: Workload,
    what: str,
    rates: dict[int, float],
    plans: Sequence[ServingPlan | TrainingPlan],
) -> None:
    from launch.planning.plot import Curve, draw
    from launch.planning.tables import amount

    name, fits = model_name(arguments.model), [plan.placement.fits for plan in plans]
    title = f"predicted {what} of {name} on {workload.profile.name}, {amount(workload)}"
    write("--plot", arguments.plot, draw([Curve(name, list(rates), list(rates.values()), fits)], title))


def model_name(model: str) -> str:
    """What people call it: of a config.json, the directory that it is in."""
    path = Path(model)
    if path.name == "config.json":
        return path.resolve().parent.name
    return path.stem if path.suffix in (".json", ".gguf") else path.name


def _refuse_if_nothing_fits(plans: Sequence[ServingPlan | TrainingPlan]) -> None:
    """What was shown says by how much; the exit status says that there is nothing to use."""
    from launch.planning.tables import shortage

    if not any(plan.placement.fits for plan in plans):
        closest = min(plans, key=lambda plan: plan.placement.short)
        raise CapacityError(f"nothing fits: {shortage(closest.placement)}")
