"""Log-probabilities of given text: those of the whole logits, at every degree, in chunks."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from generation_models import CharacterTokenizer, tiny_model
from pool import RankPool

from tp.errors import NumericalError, RequestError
from tp.generation import GenerationOptions, Score, score
from tp.parallel import TensorParallelGroup

IDS = [(7 * index * index + 3) % 97 for index in range(40)]


def _scores(group: TensorParallelGroup) -> tuple[list[Score], torch.Tensor, list[int]]:
    model = tiny_model(group, {"vocab_size": 97})
    whole = [score(model, IDS if group.rank == 0 else None)]
    widths: list[int] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: widths.append(len(output.local)))
    with (
        mock.patch("tp.generation.scoring.ROWS", 4),
        mock.patch("tp.generation.scoring.GenerationOptions", return_value=GenerationOptions(prefill_chunk=7)),
    ):
        whole.append(score(model, IDS))
    logits = model(torch.tensor([IDS], device=group.device))[0, :-1].float()
    return whole, logits.log_softmax(-1).cpu()[range(39), IDS[1:]], widths[:-1]


@pytest.mark.parametrize("t", [1, 2, 3, 4])
def test_scores_are_those_of_the_whole_logits(ranks: RankPool, t: int) -> None:
    results = ranks(t).run(_scores)
    (at_once, in_chunks), expected, widths = results[0]
    assert at_once.token_ids == tuple(IDS)
    for scored in (at_once, in_chunks):
        assert scored.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        assert scored.perplexity == pytest.approx(math.exp(-expected.mean().item()), rel=1e-4)
    assert widths == [4, 3] * 5 + [4]  # 39 positions in chunks of 7, never more than 4 rows of logits
    assert all(scores == [at_once, in_chunks] for scores, *_ in results)


def _score_text(group: TensorParallelGroup) -> Any:
    model = tiny_model(group)
    model.tokenizer = CharacterTokenizer() if group.rank == 0 else None
    return score(model, "Hello" if group.rank == 0 else None).token_ids


def test_text_is_encoded_on_rank_0(ranks: RankPool) -> None:
    assert ranks(2).run(_score_text) == [tuple(ord(letter) - 32 for letter in "Hello")] * 2


@pytest.mark.parametrize(
    "text, message",
    [([5], "has 1 tokens: scoring takes 2 to 128"), ([1] * 129, "129 tokens"), ([], "empty"), ([1, 97], "97")],
)
def test_what_cannot_be_scored_is_refused(text: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        score(tiny_model(TensorParallelGroup.alone()), text)


def test_scores_that_are_not_finite_are_an_error_and_a_huge_perplexity_is_none() -> None:
    model = tiny_model(TensorParallelGroup.alone())
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(NumericalError, match="the logits after token 0 are not finite"):
        score(model, [1, 2])
    assert Score((1, 2), (-1e4,)).perplexity == math.inf
