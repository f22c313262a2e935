"""`generate`: continues prompts, showing the text as it is made."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from launch import inputs
from launch.arguments import (
    add_layout_option,
    add_model_options,
    add_output_options,
    add_rank_options,
    layout_rule,
    positive,
)
from launch.model_command import ModelCommand, execute
from launch.report import Communication, RankMemory, Report
from launch.streaming import view_of
from launch.terminal import Terminal
from tp.defaults import MAX_NEW_TOKENS, PREFILL_CHUNK
from tp.errors import RequestError

if TYPE_CHECKING:
    from tp.generation import GenerationOptions, GenerationResult, LanguageModel
    from tp.generation.stream import TokenStream
    from tp.parallel.group import TensorParallelGroup

NAMES = inputs.Names("--prompt", "--prompt-file", "--prompt-ids")
DESCRIPTION = "Continues prompts, showing the text as it is made, then what it took."


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser("generate", help="continue prompts", description=DESCRIPTION)
    add_model_options(parser)
    inputs.add_options(parser, NAMES, "prompts, of which --prompt and --prompt-ids take several")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's turn, in the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="the system turn before it")
    _add_length_options(parser.add_argument_group("length"))
    _add_sampling_options(parser.add_argument_group("sampling"))
    add_rank_options(parser)
    add_layout_option(parser)
    add_output_options(parser)
    parser.set_defaults(execute=partial(execute, ModelCommand(check, run)))


def check(arguments: argparse.Namespace) -> None:
    """Refuses what cannot be served, before any rank starts.

    Raises:
        RequestError: options that contradict each other or are out of range.
    """
    if arguments.chat and arguments.ids:
        raise RequestError("--chat and --prompt-ids contradict each other: a chat template needs text")
    if arguments.system is not None and not arguments.chat:
        raise RequestError("--system needs --chat: plain text has no system turn")
    inputs.check_is_text("--system", arguments.system or "")
    for text in arguments.stop:
        inputs.check_is_text("--stop", text)
    generation_options(arguments)


def run(arguments: argparse.Namespace, group: TensorParallelGroup, terminal: Terminal) -> None:
    """Loads the model and serves the request, on every rank."""
    began = time.perf_counter()
    model = load_model(arguments, group, terminal)
    prompts = group.agree(lambda: _prompts(model, arguments) if group.rank == 0 else None)
    load_s = time.perf_counter() - began
    group.communicator.statistics.reset()
    began = time.perf_counter()
    stream = model.generate_stream(prompts, generation_options(arguments))
    has_text = terminal.speaks and model.tokenizer is not None  # other ranks need not load it
    still_read = _follow(stream, arguments, len(prompts or ()), has_text, terminal)
    seconds = time.perf_counter() - began
    report = _report(arguments, model, stream.result(), load_s, seconds)
    if arguments.json:
        terminal.show(report.json() + "\n")
    elif still_read:
        report.print_to(terminal.console)


def generation_options(arguments: argparse.Namespace) -> GenerationOptions:
    """The options of a request.

    Raises:
        RequestError: a value out of range, or options that contradict each other.
    """
    from tp.generation import GenerationOptions, SamplingParameters

    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    return GenerationOptions(
        max_new_tokens=arguments.max_new_tokens,
        min_new_tokens=arguments.min_new_tokens,
        ignore_eos=arguments.ignore_eos,
        stop=tuple(arguments.stop),
        prefill_chunk=arguments.prefill_chunk,
        sampling=SamplingParameters(**{name: getattr(arguments, name) for name in names}),
    )


def load_model(arguments: argparse.Namespace, group: TensorParallelGroup, terminal: Terminal) -> LanguageModel:
    """The model of the command line, on this rank, with a progress bar where the user can see one."""
    from tp.generation.loading import load
    from tp.models import prepare_for_inference

    with terminal.progress("loading") as progress:
        model = load(
            arguments.model,
            group,
            arguments.dtype,
            max_context=arguments.max_context,
            max_batch_size=getattr(arguments, "max_batch_size", None),
            progress=progress,
        )
    model.model.choose_layout = layout_rule(arguments.sequence_parallel)
    if arguments.weights != "plain":
        prepare_for_inference(model, arguments.weights)
    return model


def _prompts(model: LanguageModel, arguments: argparse.Namespace) -> Sequence[str] | Sequence[list[int]]:
    """What `generate` is given; the tokenizer is loaded here, so that its time does not count as the first token's."""
    _ = model.tokenizer
    given = inputs.of(arguments)
    if not arguments.chat:
        return given
    from tp.generation.chat import conversation, encode_chat

    tokenizer = model.require_tokenizer()
    return [encode_chat(tokenizer, conversation(str(text), arguments.system)) for text in given]


def _follow(
    stream: TokenStream, arguments: argparse.Namespace, num_prompts: int, has_text: bool, terminal: Terminal
) -> bool:
    """Shows tokens as they come. False where nobody reads them any more: then the request is cancelled on all ranks."""
    view = view_of(num_prompts, has_text=has_text, quiet=arguments.json or not terminal.speaks)
    with stream:
        try:
            for event in stream:
                terminal.show(view.text_for(event))
        except BrokenPipeError:
            stream.close()
            terminal.abandon()
            return False
    return True


def _report(
    arguments: argparse.Namespace, model: LanguageModel, result: GenerationResult, load_s: float, seconds: float
) -> Report:
    from tp.dtypes import dtype_name

    group, statistics = model.group, model.group.communicator.statistics
    communication = Communication(statistics.calls, statistics.bytes, statistics.seconds)
    memory = RankMemory.of_this_rank(model, result.kv_bytes)
    return Report(
        model=arguments.model,
        tp_size=group.size,
        dtype=dtype_name(model.dtype),
        weights=arguments.weights,
        device=group.device.type,
        result=result,
        load_s=load_s,
        seconds=seconds,
        ranks=tuple(group.communicator.all_gather_object(memory)),
        communication=communication,
    )


def _add_length_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS, metavar="N", help="default %(default)s")
    group.add_argument("--min-new-tokens", type=int, default=0, metavar="N", help="end ids are masked until then")
    group.add_argument("--ignore-eos", action="store_true", help="end ids end nothing")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends a sequence; may be repeated")
    group.add_argument("--max-batch-size", type=positive, metavar="N", help="prompts at once (default: all)")
    step = "prompt tokens a step (default %(default)s)"
    group.add_argument("--prefill-chunk", type=int, default=PREFILL_CHUNK, metavar="N", help=step)


def _add_sampling_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 (default): the likeliest token")
    group.add_argument("--top-k", type=int, default=0, metavar="N", help="among the N likeliest tokens (0: all)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="X", help="among those that sum to probability X")
    group.add_argument("--min-p", type=float, default=0.0, metavar="X", help="among those X times the likeliest")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="1 (default): none")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default 0)")
