"""What a model would predict if it ended at a state: the logit lens.

nostalgebraist 2020, "interpreting GPT: the logit lens". A state goes through the final norm and the LM head. Each rank
knows its columns of the logits; what is exchanged are a few statistics and candidates of each row, never logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tp.errors import RequestError
from tp.generation.processors import best_columns
from tp.kernels.argmax_and_sum_exp import LOWEST
from tp.layers.sharded_logits import ShardedLogits
from tp.models.causal_lm import CausalLM

ROWS = 32
"""Rows whose logits exist at once, in float64: [32, ⌈V/t⌉], and as many of final states."""


@dataclass(frozen=True)
class Lens:
    """A distribution over the vocabulary for each state, and how far it is from the final one; equal on all ranks.

    Attributes:
        token_ids: [..., top] int64, the likeliest tokens, the likeliest first; of equally likely ones the lowest id.
        probabilities: [..., top] float64, theirs.
        entropy: [...] float64, −Σ p ln p in nats.
        kl_from_final: [...] float64, KL(final ‖ lens) = Σ p_final ln(p_final / p_lens) in nats.
        kl_to_final: [...] float64, KL(lens ‖ final) = Σ p_lens ln(p_lens / p_final) in nats.
    """

    token_ids: Tensor
    probabilities: Tensor
    entropy: Tensor
    kl_from_final: Tensor
    kl_to_final: Tensor


@torch.no_grad()
def logit_lens(model: CausalLM, states: Tensor, top: int = 5) -> Lens:
    """The lens of states of the stream. Every rank calls it, with the same states.

    Args:
        states: [L, D], the states of one token from the first to the final one, or [L, …, D], those of several tokens.
            The last along the first dim are the final ones, which the others are compared with. With `resid_post` of
            the last layer there, "final" is the model's own prediction. Cast to the model's dtype.
        top: how many tokens of each distribution are told, at most V.

    Raises:
        RequestError: states of another width, or none; `top` below 1.
    """
    if states.dim() < 2 or states.shape[-1] != model.config.hidden_size or not states.numel():
        raise RequestError(f"states are {tuple(states.shape)}: the lens takes [L, ..., {model.config.hidden_size}]")
    if top < 1:
        raise RequestError(f"top is {top}: it must be at least 1")
    by_token = states.to(model.group.device, model.dtype).reshape(len(states), -1, states.shape[-1])
    lens = _joined([_lens_of_tokens(model, tokens, top) for tokens in by_token.split(ROWS, dim=1)], dim=1)
    return Lens(*(column.reshape(*states.shape[:-1], *column.shape[2:]) for column in _columns(lens)))


def _lens_of_tokens(model: CausalLM, states_LTD: Tensor, top: int) -> Lens:
    """Of so few tokens that their final logits exist at once."""
    final = _shifted(_logits(model, states_LTD[-1]))
    layers = states_LTD.split(max(1, ROWS // states_LTD.shape[1]))
    return _joined([_lens(_logits(model, states), final, top) for states in layers], dim=0)


def _lens(logits: ShardedLogits, y: Tensor, top: int) -> Lens:
    """Of logits x of the lens; y are the final ones. Both are taken relative to their largest.

    With p = exp(x), Z_p = Σ p, E_p the mean under p / Z_p, and q of y: H(p) = ln Z_p − E_p[x];
    KL(p ‖ q) = E_p[x − y] − ln Z_p + ln Z_q.
    """
    x = _shifted(logits)
    p, q = x.exp(), y.exp()
    own = [p.sum(-1), q.sum(-1).expand(p.shape[:-1]), (p * x).sum(-1), (p * (x - y)).sum(-1), (q * (y - x)).sum(-1)]
    z_p, z_q, x_sum, p_sum, q_sum = logits.group.communicator.all_reduce(torch.stack(own)).unbind(0)
    token_ids, best = _best(logits, x, min(top, logits.vocab_size))
    return Lens(
        token_ids=token_ids,
        probabilities=best.exp() / z_p.unsqueeze(-1),
        entropy=z_p.log() - x_sum / z_p,
        kl_from_final=(q_sum / z_q - z_q.log() + z_p.log()).clamp_min(0),
        kl_to_final=(p_sum / z_p - z_p.log() + z_q.log()).clamp_min(0),
    )


def _logits(model: CausalLM, states: Tensor) -> ShardedLogits:
    norm = model.model.norm
    logits: ShardedLogits = model.lm_head(states if norm is None else norm(states))
    return logits


def _shifted(logits: ShardedLogits) -> Tensor:
    """[..., this rank's real columns] float64, relative to the row's largest on any rank."""
    valid = logits.valid.double()
    own = valid.amax(-1) if logits.num_valid else valid.new_full(valid.shape[:-1], LOWEST)  # a rank may own none
    largest = logits.group.communicator.all_gather_stacked(own).amax(0)
    return valid - largest.unsqueeze(-1)


def _best(logits: ShardedLogits, shifted: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and shifted logits of the `count` best of each row: each rank's best travel in one all-gather.

    They are compared as they are: shifted ones would be rounded once more, to ties that there are not.
    """
    own = logits.valid.float().nan_to_num(nan=LOWEST)  # so that padding, which stands last, is never before an id
    own, values = (logits.padded(of_valid).flatten(0, -2) for of_valid in (own, shifted))
    columns = best_columns(own, min(count, own.shape[-1]))
    ids = (columns + logits.vocab_start_index).double()
    packed = torch.stack([own.gather(-1, columns).double(), values.gather(-1, columns), ids])
    gathered = logits.group.communicator.all_gather_stacked(packed)
    candidates, values, ids = gathered.permute(1, 2, 0, 3).flatten(2)
    best = best_columns(candidates.float(), count)  # ranks stand in the order of their ids: ties go to the lowest
    shape = logits.local.shape[:-1]
    return ids.gather(-1, best).long().unflatten(0, shape), values.gather(-1, best).unflatten(0, shape)


def _joined(lenses: Sequence[Lens], dim: int) -> Lens:
    return Lens(*(torch.cat(columns, dim) for columns in zip(*map(_columns, lenses), strict=True)))


def _columns(lens: Lens) -> list[Tensor]:
    return [getattr(lens, column.name) for column in fields(Lens)]
