"""From a path to a model that can generate: each rank reads its own slices, after it is known that they fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import torch

from tp.checkpoint import check_fits, open_checkpoint, weight_bytes
from tp.dtypes import DTYPES
from tp.errors import ConfigError
from tp.generation.language_model import LanguageModel
from tp.huge_pages import materialise
from tp.parallel.agreement import check_alike
from tp.parallel.group import TensorParallelGroup


def load(
    path: str,
    group: TensorParallelGroup | None = None,
    dtype: torch.dtype | str = "auto",
    *,
    max_batch_size: int | None = None,
    max_context: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LanguageModel:
    """A model from a Hub directory, a Hub id or a GGUF file, split over the group. Every rank calls it.

    Args:
        path: directory, Hub id ("owner/name"), or .gguf file.
        group: the ranks; alone by default.
        dtype: of parameters and stream: a torch dtype, its name, or "auto": the checkpoint's own (bfloat16 for GGUF).
        max_batch_size, max_context: see `LanguageModel`.
        progress: called with (bytes of this rank's parameters filled so far, bytes of all of them).

    Raises:
        CheckpointError: no checkpoint there, or one that is damaged or incomplete.
        ConfigError: an unsupported model or dtype, or more ranks than it has query heads.
        RequestError: max_context or max_batch_size out of range.
        CapacityError: the weights, with a cache of max_context where that is given, do not fit in memory.
        CommunicationError: ranks that were given different checkpoints or dtypes.
        All of them on every rank; all but damage found on the way before any weight is read or allocated.
    """
    group = group or TensorParallelGroup.alone()
    wanted = None if dtype == "auto" else as_dtype(dtype)
    check_alike(group.communicator, {"dtype": str(wanted or dtype)})
    with closing(open_checkpoint(path, group)) as checkpoint:
        model = LanguageModel(
            checkpoint.config,
            group,
            dtype=wanted or checkpoint.default_dtype,
            device="meta",
            max_batch_size=max_batch_size,
            max_context=max_context,
        )
        checkpoint.verify(model)
        check_fits(
            checkpoint.config,
            group,
            weight_bytes=weight_bytes(model),
            num_slots=max_batch_size or 1,
            capacity=max_context or 1,
            dtype=model.dtype,
        )
        materialise(model, group.device)
        model.load_report = checkpoint.load_into(model, progress)
    model.eos_token_ids = checkpoint.generation_eos_token_ids
    model.set_tokenizer_loader(checkpoint.tokenizer)
    return model.eval()


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A floating-point dtype by its name.

    Raises:
        ConfigError: not one that a model can run in.
    """
    if dtype in DTYPES.values():
        assert isinstance(dtype, torch.dtype)
        return dtype
    if str(dtype) not in DTYPES:
        raise ConfigError(f"dtype {str(dtype)!r} is not supported: auto, {', '.join(DTYPES)}")
    return DTYPES[str(dtype)]
