"""Training checkpoints: Hub directories that transformers opens, with the optimiser's state whole beside the weights.

    OUTPUT/step-00000200/            config.json, model.safetensors, tokenizer: a Hub checkpoint
    OUTPUT/step-00000200/training/   optimizer.safetensors (both moments by Hub name), run.json

A directory appears by one rename when it is complete, so that an interrupted save leaves the one before it. No file
knows the tensor-parallel degree, the layout or the data-parallel degree: a run resumes at any other.
"""

from __future__ import annotations

import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tp.checkpoint import open_checkpoint
from tp.checkpoint.new_directory import new_directory
from tp.checkpoint.safetensors_source import SafetensorsSource
from tp.checkpoint.tensor_writer import HeldTensors, whole_tensors, write_tensors
from tp.checkpoint.writer import weight_bytes_of_whole, write_json, write_model
from tp.errors import CheckpointError
from tp.json_objects import read_object
from tp.models.causal_lm import CausalLM
from tp.training.optimizer import optimizer_state, set_step_count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PREFIX = "step-"
STATE = "training"
OPTIMIZER, RUN = "optimizer.safetensors", "run.json"
_NAME = re.compile(PREFIX + "[0-9]{8,15}")


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        directory: of the run; made when the first checkpoint is saved.
        keep: how many of the newest checkpoints stay; 0 = all.
    """

    def __init__(self, directory: Path, keep: int = 0) -> None:
        self.directory = directory
        self.keep = keep

    def path_of(self, step: int) -> Path:
        return self.directory / f"{PREFIX}{step:08d}"

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first. What an interrupted save left has another name."""
        names = [path.name for path in self.directory.glob(f"{PREFIX}*") if path.is_dir()]
        steps = [int(name.removeprefix(PREFIX)) for name in names if _NAME.fullmatch(name)]
        return sorted(step for step in steps if self.path_of(step).name in names)

    def clear_leftovers(self) -> None:
        """Removes what interrupted saves left. For one process, while no other saves."""
        for pattern in (f".{PREFIX}*.partial-*", ".dropped-*"):
            for path in self.directory.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)

    @torch.no_grad()
    def save(
        self,
        step: int,
        model: CausalLM,
        optimizer: torch.optim.AdamW,
        tokenizer: PreTrainedTokenizerBase | None,
        run: dict[str, Any],
    ) -> Path:
        """Saves after `step` steps, and drops the oldest beyond `keep`. Every rank of the model's group calls it.

        Args:
            tokenizer: saved beside the weights; only rank 0's counts.
            run: what the run needs to know again; JSON.

        Raises:
            CheckpointError: on all ranks of the group, and the checkpoints before it are as they were.
        """
        writes = model.group.rank == 0
        target = self.path_of(step)
        if step in self.steps():
            return target
        with new_directory(target, model.group, 3 * weight_bytes_of_whole(model)) as partial:
            write_model(model, partial, tokenizer)
            model.group.agree(lambda: _begin_state(partial / STATE, {"step": step, **run}) if writes else None)
            held = HeldTensors(optimizer_state(model, optimizer), model.group)
            write_tensors(partial / STATE / OPTIMIZER, model.group.agree(lambda: whole_tensors(held)), held)
        if writes:
            self._drop_old()
        return target

    def load(self, step: int, model: CausalLM, optimizer: torch.optim.AdamW) -> dict[str, Any]:
        """Fills model and optimiser from the checkpoint of `step`, at this degree; returns its `run`.

        Raises:
            CheckpointError: it is damaged or of another model; on all ranks of the group.
        """
        path = self.path_of(step)
        with closing(open_checkpoint(path, model.group)) as checkpoint:
            checkpoint.load_into(model)
        model.group.agree(lambda: _load_optimizer(path / STATE / OPTIMIZER, model, optimizer))
        set_step_count(optimizer, step)
        return model.group.agree(lambda: _run_of(path, step))

    def _drop_old(self) -> None:
        """Renamed first: a half-removed checkpoint must not look complete."""
        for step in self.steps()[: -self.keep] if self.keep else []:
            doomed = self.directory / f".dropped-{step:08d}"
            self.path_of(step).rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def read_run(path: Path) -> dict[str, Any]:
    """The run.json of a training checkpoint.

    Raises:
        CheckpointError: it is not there or no JSON object.
    """
    return read_object(path / STATE / RUN, CheckpointError)


def _run_of(path: Path, step: int) -> dict[str, Any]:
    run = read_run(path)
    if run.get("step") != step:
        raise CheckpointError(f"{path / STATE / RUN} says step {run.get('step')!r}: the directory's name was changed")
    return run


def _begin_state(directory: Path, run: dict[str, Any]) -> None:
    try:
        directory.mkdir()
        write_json(directory / RUN, run)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be written: {error.strerror or error}") from error


@torch.no_grad()
def _load_optimizer(path: Path, model: CausalLM, optimizer: torch.optim.AdamW) -> None:
    with closing(SafetensorsSource([path])) as source:
        for moment in optimizer_state(model, optimizer):
            moment.tensor.zero_()
            for part in moment.parts:
                stored = source.tensors.get(part.name)
                own = list(moment.tensor.shape)
                own[part.dim] = part.global_length
                if stored is None or list(stored.shape) != own:
                    found = "absent" if stored is None else list(stored.shape)
                    raise CheckpointError(f"{path}: {part.name} is {found}, the model needs {own}")
                if stored.torch_dtype is None:
                    raise CheckpointError(f"{path}: {part.name} is stored as {stored.dtype}, which is not read")
                source.read_into(part.name, part.dim, part.global_start, part.length, moment.slice_of(part))
