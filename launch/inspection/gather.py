"""One forward of the prompt with everything captured that a report shows. Every rank calls it alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from launch.inspection.findings import Attribution, Findings, LayerFindings, LensCell, Run
from launch.inspection.question import Question
from tp.errors import NumericalError
from tp.generation.scoring import token_logprobs
from tp.inspection import ActivationCache, capture, direct_contributions, logit_lens
from tp.layers.step import SequenceSlice, Step

if TYPE_CHECKING:
    from tp.generation import LanguageModel

MOST_POSITIONS = 64
"""Of a longer prompt, the first position and the last ones are shown: what is captured stays small."""
LENS_POSITIONS = 8
"""Whose lens is computed at once, between two reports of progress."""
LENS_TOP = 5
"""Tokens that the lens names."""
ADVICE = "try dtype float32 or bfloat16, or check the weights"
NOT_LINEAR = (
    "This model is post-norm: it norms the stream itself after every add, so that no linear path leads from a write "
    "to a logit, and the logit does not split into contributions."
)

Progress = Callable[[int, int], object]


@torch.no_grad()
def look(model: LanguageModel, question: Question, run: Run, progress: Progress) -> Findings:
    """Runs the prompt once and measures what passed.

    Args:
        progress: called with (positions looked at, all of them).

    Raises:
        NumericalError: the stream is not finite.
    """
    positions = shown_positions(len(question.token_ids))
    points = ("embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post", "z")
    with capture(model, points, positions=positions) as cache:
        ids = torch.tensor(question.token_ids, device=model.group.device)
        model.residual_stream(Step(ids, (SequenceSlice(len(ids)),))).settle()
    layers = tuple(_layer(cache, index) for index in range(model.config.num_layers))
    embed_norms = _norms(cache.value("embed"))
    _check_finite([embed_norms, *(layer.stream_norms for layer in layers)], positions)
    states = torch.stack([cache.value("embed"), *(cache.value("resid_post", layer) for layer in range(len(layers)))])
    lens = _lens(model, states, progress)
    _check_lens(lens)
    target_id = lens[-1][-1].token_ids[0] if question.target_id is None else question.target_id
    attribution = None
    if model.config.norm_placement != "post":
        attribution = _attribution(model, cache, target_id, question.against_id)
    return Findings(
        run=run,
        token_ids=question.token_ids,
        positions=positions,
        embed_norms=embed_norms,
        layers=layers,
        lens=lens,
        target_id=target_id,
        against_id=question.against_id,
        target_by_state=_probabilities(model, states[:, -1], target_id),
        attribution=attribution,
        no_attribution=NOT_LINEAR if attribution is None else "",
    )


def shown_positions(num_tokens: int) -> tuple[int, ...]:
    """All positions of a short prompt; else the first, and as many of the last as make `MOST_POSITIONS`."""
    return (0, *range(max(1, num_tokens - MOST_POSITIONS + 1), num_tokens))


def _layer(cache: ActivationCache, layer: int) -> LayerFindings:
    attention, mlp = cache.value("attn_out", layer), cache.value("mlp_out", layer)
    return LayerFindings(
        stream_norms=_norms(cache.value("resid_post", layer)),
        attention_norms=_norms(attention),
        mlp_norms=_norms(mlp),
        attention_cosines=_cosines(attention, cache.value("resid_pre", layer)),
        mlp_cosines=_cosines(mlp, cache.value("resid_mid", layer)),
    )


def _norms(rows: Tensor) -> tuple[float, ...]:
    return tuple(rows.double().norm(dim=-1).tolist())


def _cosines(writes: Tensor, states: Tensor) -> tuple[float, ...]:
    """0 where either is nothing."""
    return tuple(torch.nn.functional.cosine_similarity(writes.double(), states.double(), dim=-1).tolist())


def _lens(model: LanguageModel, states: Tensor, progress: Progress) -> tuple[tuple[LensCell, ...], ...]:
    """[states, positions, D] → [states][positions]."""
    columns: list[list[LensCell]] = []
    for some in states.split(LENS_POSITIONS, dim=1):
        progress(len(columns), states.shape[1])
        lens = logit_lens(model, some, top=LENS_TOP)
        measures = (lens.token_ids, lens.probabilities, lens.entropy, lens.kl_from_final)
        columns += [_cells(column) for column in zip(*(of.transpose(0, 1).tolist() for of in measures), strict=True)]
    progress(len(columns), states.shape[1])
    return tuple(zip(*columns, strict=True))


def _cells(column: Iterable[list[Any]]) -> list[LensCell]:
    """Of one position, from its values in each state."""
    return [
        LensCell(tuple(token_ids), tuple(probabilities), entropy, kl)
        for token_ids, probabilities, entropy, kl in zip(*column, strict=True)
    ]


def _attribution(model: LanguageModel, cache: ActivationCache, target_id: int, against_id: int | None) -> Attribution:
    parts = direct_contributions(model, cache, target_id, against_id)
    assert parts.heads is not None and parts.attention_bias is not None
    return Attribution(
        logit=parts.logit.item(),
        embedding=parts.embedding.item(),
        attention=tuple(parts.attention.tolist()),
        mlp=tuple(parts.mlp.tolist()),
        heads=tuple(map(tuple, parts.heads.tolist())),
        attention_bias=tuple(parts.attention_bias.tolist()),
        final_bias=parts.final_bias.item(),
        rounding=parts.rounding.item(),
    )


def _probabilities(model: LanguageModel, states: Tensor, token_id: int) -> tuple[float, ...]:
    """[states, D] → that of the token in the lens of each."""
    norm = model.model.norm
    logits = model.lm_head(states if norm is None else norm(states))
    targets = torch.full((len(states),), token_id, device=states.device)
    return tuple(token_logprobs(logits, targets).exp().tolist())


def _check_lens(lens: tuple[tuple[LensCell, ...], ...]) -> None:
    for state, cells in enumerate(lens):
        if not all(math.isfinite(cell.entropy + cell.kl) for cell in cells):
            raise NumericalError(f"the logits {_after(state)} are not finite: {ADVICE}")


def _check_finite(norms_by_state: list[tuple[float, ...]], positions: tuple[int, ...]) -> None:
    for state, norms in enumerate(norms_by_state):
        for position, norm in zip(positions, norms, strict=True):
            if not math.isfinite(norm):
                raise NumericalError(f"the stream {_after(state)} is not finite at position {position}: {ADVICE}")


def _after(state: int) -> str:
    return f"after layer {state - 1}" if state else "after the embedding"
