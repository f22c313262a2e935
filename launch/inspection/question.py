"""What is asked of the model: a prompt, and the tokens whose logits are looked at; equal on all ranks."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launch import inputs
from launch.inspection.target import token_of
from tp.errors import RequestError

if TYPE_CHECKING:
    from tp.generation import LanguageModel


@dataclass(frozen=True)
class Question:
    """A prompt's token ids, and the ids of --target and --against where they are given."""

    token_ids: tuple[int, ...]
    target_id: int | None
    against_id: int | None

    @classmethod
    def shared(cls, arguments: argparse.Namespace, model: LanguageModel) -> Question:
        """Rank 0's question on every rank.

        Raises:
            RequestError: a prompt without tokens, or longer than the context; a target that is not one token.
        """
        group = model.group
        own = group.agree(lambda: cls._asked(arguments, model) if group.rank == 0 else None)
        question: Question = group.communicator.all_gather_object(own)[0]
        return question

    @classmethod
    def _asked(cls, arguments: argparse.Namespace, model: LanguageModel) -> Question:
        from tp.generation.request import encode_prompts

        (token_ids,) = encode_prompts(model, inputs.of(arguments))
        if len(token_ids) > model.context:
            raise RequestError(f"the prompt has {len(token_ids)} tokens, the context {model.context}: shorten it")
        target, against = (
            None if given is None else token_of(option, given, model)
            for option, given in (("--target", arguments.target), ("--against", arguments.against))
        )
        return cls(token_ids, target, against)
