"""llama.cpp through the functions of its Python binding: one process, weights in bfloat16 or float16."""

from __future__ import annotations

import ctypes
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launch.measurement.child import Command
from launch.measurement.contestants import Contestant
from launch.measurement.errors import ContestantError
from launch.measurement.peers.environments import HOME, interpreter
from launch.measurement.peers.task import Task, arguments_of_module
from launch.measurement.requests import DecodeAnswer, DecodeRequest
from launch.measurement.serving import Line, TokenClock, serve
from tp.defaults import PREFILL_CHUNK

NAME = "llama_cpp"
MODULE = "launch.measurement.peers.llama_cpp"
FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32}
"""What `llama_model_quantize` calls the dtypes."""


def contestant(task: Task, processes: int, threads: int) -> Contestant:
    """The one form that there is: one process."""

    def command() -> Command:
        if processes > 1:
            raise ContestantError("llama.cpp does not split a model over CPU processes")
        gguf = gguf_of(task)
        options = Task(gguf, task.dtype, task.most_sequences, task.most_tokens).options(processes, threads)
        return Command([interpreter(NAME), "-m", MODULE, *options])

    return Contestant(NAME, processes, threads, command)


def gguf_of(task: Task) -> str:
    """The GGUF file of the task's model: given, the model itself, or the one beside the directory.

    Raises:
        ContestantError: there is none, or the one that was given is none.
    """
    candidates = [task.model, f"{Path(task.model)}.gguf"] if task.gguf is None else [task.gguf]
    for candidate in candidates:
        if candidate.endswith(".gguf") and Path(candidate).is_file():
            return str(Path(candidate).resolve())
    if task.gguf is not None:
        raise ContestantError(f"--gguf {task.gguf} is no .gguf file")
    raise ContestantError(f"there is no GGUF file beside {task.model}: name one with --gguf")


def main() -> None:
    """Serves."""
    arguments = arguments_of_module()
    line = Line()
    serve(line, lambda: _load(arguments))


def _load(arguments: Namespace) -> tuple[Callable[[DecodeRequest], DecodeAnswer], dict[str, Any]]:
    import llama_cpp  # type: ignore[import-not-found]

    path = _in_dtype(Path(arguments.model), arguments.dtype)
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), llama_cpp.llama_model_default_params())
    if not model:
        raise ContestantError(f"llama.cpp could not load {path}")
    context = _context(arguments, model)
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    return lambda request: _decode(context, size, request), {"version": llama_cpp.__version__}


def _in_dtype(source: Path, dtype: str) -> Path:
    """The model with its matrices in that dtype, made once and kept among the environments."""
    import llama_cpp

    status = source.stat()
    target = HOME / "models" / f"{source.stem}-{status.st_size}-{int(status.st_mtime)}-{dtype}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(".unfinished")
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype = FILE_TYPES[dtype]
        options.allow_requantize = True
        if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(unfinished), ctypes.byref(options)):
            raise ContestantError(f"llama.cpp could not write {source} in {dtype}")
        unfinished.replace(target)
    return target


def _context(arguments: Namespace, model: Any) -> Any:
    import llama_cpp

    options = llama_cpp.llama_context_default_params()
    options.n_seq_max = arguments.most_sequences
    options.n_ctx = arguments.most_sequences * (arguments.most_tokens + 256)  # it rounds the share of each up
    options.n_batch = options.n_ubatch = PREFILL_CHUNK
    options.n_threads = options.n_threads_batch = arguments.threads
    context = llama_cpp.llama_init_from_model(model, options)
    if not context:
        raise ContestantError("llama.cpp could not make a context")
    return context


def _decode(context: Any, vocab_size: int, request: DecodeRequest) -> DecodeAnswer:
    import llama_cpp

    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    batch = llama_cpp.llama_batch_init(PREFILL_CHUNK, 0, 1)
    clock = TokenClock(request.batch)
    try:
        latest = _prefill(context, batch, vocab_size, request)
        clock.tokens()
        new_ids = [[token] for token in latest]
        for position in range(len(request.prompt_ids[0]), len(request.prompt_ids[0]) + request.new_tokens - 1):
            _fill(batch, [(ids[-1], position, index, True) for index, ids in enumerate(new_ids)])
            _run(context, batch)
            for index, ids in enumerate(new_ids):
                ids.append(_likeliest(context, index, vocab_size))
            clock.tokens()
    finally:
        llama_cpp.llama_batch_free(batch)
    return clock.answer(new_ids)


def _prefill(context: Any, batch: Any, vocab_size: int, request: DecodeRequest) -> list[int]:
    """Processes all prompts, many tokens a call; gives the first new token of each."""
    entries = [
        (token, position, index, position == len(ids) - 1)
        for index, ids in enumerate(request.prompt_ids)
        for position, token in enumerate(ids)
    ]
    first = []
    for start in range(0, len(entries), PREFILL_CHUNK):
        step = entries[start : start + PREFILL_CHUNK]
        _fill(batch, step)
        _run(context, batch)
        first += [_likeliest(context, at, vocab_size) for at, (_, _, _, wanted) in enumerate(step) if wanted]
    return first


def _fill(batch: Any, entries: Sequence[tuple[int, int, int, bool]]) -> None:
    """The next call's tokens, each with its position, its sequence, and whether its logits are wanted."""
    batch.n_tokens = len(entries)
    for at, (token, position, sequence, wanted) in enumerate(entries):
        batch.token[at] = token
        batch.pos[at] = position
        batch.n_seq_id[at] = 1
        batch.seq_id[at][0] = sequence
        batch.logits[at] = wanted


def _run(context: Any, batch: Any) -> None:
    import llama_cpp

    status = llama_cpp.llama_decode(context, batch)
    if status:
        raise ContestantError(f"llama_decode returned {status}")


def _likeliest(context: Any, at: int, vocab_size: int) -> int:
    import llama_cpp
    import numpy

    logits = llama_cpp.llama_get_logits_ith(context, at)
    return int(numpy.ctypeslib.as_array(logits, shape=(vocab_size,)).argmax())


if __name__ == "__main__":
    main()
