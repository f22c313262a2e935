"""Direct logit attribution: what the embedding, each sublayer and each head add to a logit.

The stream before the final norm is a sum, x_L = x_0 + Σ_l (a_l + m_l) (Elhage et al. 2021, "A Mathematical Framework
for Transformer Circuits"), and the final norm is linear once its scale is held at what this run's x_L made it:

    logit_i = W_U[i] · (w ⊙ x_L / rms(x_L))          RMSNorm
    logit_i = W_U[i] · (w ⊙ (x_L − mean(x_L)) / sd(x_L) + b)          LayerNorm

So with g = w ⊙ W_U[i] / rms (LayerNorm: minus its own mean, since centring x is centring g), the logit is g · x_L, and
that of a write u is g · u. What a part adds by changing the scale is not in its contribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tp.errors import RequestError
from tp.inspection.activation_cache import ActivationCache
from tp.inspection.identity import check_stream_is_a_sum
from tp.inspection.points import integer
from tp.kernels.embedding_lookup import embedding_lookup
from tp.kernels.int8_weight import Int8Weight
from tp.layers.norm import LayerNorm, Norm, RMSNorm
from tp.models.causal_lm import CausalLM
from tp.models.decoder import DecoderLayer
from tp.parallel.partition import query_head_ranges

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Contributions:
    """Addends of a logit, or of the difference of two; float64, equal on all ranks.

    embedding + Σ attention + Σ mlp + final_bias + rounding = logit, and of each layer, where heads were captured,
    Σ heads + attention_bias = attention, up to rounding. Every shape ends in that of `target_ids`: nothing for one id.

    Attributes:
        logit: of the captured final state.
        embedding: [...].
        attention, mlp: [L, ...], of what each sublayer wrote.
        heads: [L, H, ...], of all query heads; None where their z was not captured.
        attention_bias: [L, ...], of the bias of each output projection and of the norm of its write (sandwich
            placement); None as `heads`.
        final_bias: [...], of the final LayerNorm's bias; 0 for RMSNorm.
        rounding: [...], of what the adds rounded off.
    """

    logit: Tensor
    embedding: Tensor
    attention: Tensor
    mlp: Tensor
    heads: Tensor | None
    attention_bias: Tensor | None
    final_bias: Tensor
    rounding: Tensor


@torch.no_grad()
def direct_contributions(
    model: CausalLM,
    cache: ActivationCache,
    target_ids: int | Sequence[int] | Tensor,
    against: int | Sequence[int] | Tensor | None = None,
    row: int = -1,
) -> Contributions:
    """The parts of the logit of `target_ids`, or of what it is above that of `against`, at one captured row.

    Every rank calls it alike. Communicated are the rows of W_U of these ids, and one number a head; in sandwich
    placement also one [D] a layer.

    Args:
        cache: of "embed", and "attn_out", "mlp_out" and "resid_post" in all layers, and of "z" for the heads; not
            sharded.
        target_ids: one id, or several, each for itself; a tensor of any shape, of any integer type.
        against: as many ids, or one for all.
        row: of the cache's rows, the last by default.

    Raises:
        RequestError: a post-norm model, whose states are no sums; a value that was not captured whole; a row or id that
            there is not; ids that are no whole numbers; another number of them to compare with.
    """
    check_stream_is_a_sum(cache, "direct logit attribution")
    if cache.sharded:
        raise RequestError("direct logit attribution needs whole rows: capture without sharded=True")
    row, num_rows = integer("row", row), len(cache.tokens)
    if not -num_rows <= row < num_rows:
        raise RequestError(f"row {row} is outside the {num_rows} captured rows")
    directions = _unembedding(model, target_ids, against)
    run = _Row(cache, row, model.group.device)
    layers = range(model.config.num_layers)
    final = run.value("resid_post", layers[-1])
    assert model.model.norm is not None
    g, final_bias = _pulled_back(model.model.norm, final, directions)
    embedding = g @ run.value("embed")
    attention, mlp = (
        torch.stack([g @ run.value(point, layer) for layer in layers]) for point in ("attn_out", "mlp_out")
    )
    heads, attention_bias = _heads(model, run, g) if run.has_heads else (None, None)
    logit = g @ final + final_bias
    rounding = logit - (embedding + attention.sum(0) + mlp.sum(0) + final_bias)
    return Contributions(logit, embedding, attention, mlp, heads, attention_bias, final_bias, rounding)


@dataclass(frozen=True)
class _Row:
    """One row of a cache, in float64."""

    cache: ActivationCache
    row: int
    device: torch.device

    def value(self, point: str, layer: int | None = None) -> Tensor:
        return self.cache.value(point, layer)[self.row].to(self.device).double()

    @property
    def has_heads(self) -> bool:
        config = self.cache.config
        all_heads = len(self.cache.heads) == config.num_attention_heads
        return all_heads and all(("z", layer) in self.cache for layer in range(config.num_layers))


def _heads(model: CausalLM, run: _Row, g: Tensor) -> tuple[Tensor, Tensor]:
    """Contributions of all heads, [L, H, ...], and of what else is in each attention's write, [L, ...].

    a = Σ_h W_O[:, h] z_h + b, so that head h gives (W_O[:, h]ᵀ g) · z_h, which the rank that has the head computes.
    """
    of_layers, rests = [], []
    for index, layer in enumerate(model.model.layers):
        assert isinstance(layer, DecoderLayer)
        attention = layer.self_attn
        own = run.value("z", index)[attention.heads.start : attention.heads.stop]
        weight = _dense(attention.o_proj.weight)
        bias = weight.new_zeros(len(weight)) if attention.o_proj.bias is None else attention.o_proj.bias.double()
        of_write, rest = g, torch.zeros_like(g[..., 0])
        if layer.attention_norms.of_write is not None:
            write = model.group.communicator.all_reduce(weight @ own.flatten()) + bias
            of_write, rest = _pulled_back(layer.attention_norms.of_write, write, g)
        of_layers.append(((of_write @ weight).unflatten(-1, own.shape) * own).sum(-1))
        rests.append(of_write @ bias + rest)
    heads_first = torch.stack(of_layers).movedim(-1, 0)
    sizes = [len(heads) for heads in query_head_ranges(model.config.num_attention_heads, model.group.size)]
    return model.group.communicator.all_gather(heads_first, sizes).movedim(0, 1), torch.stack(rests)


def _pulled_back(norm: Norm, x: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """(g, c) with directions · norm(y) = g · y + c for every y, if the norm's scale stays what x makes it."""
    assert isinstance(norm, (RMSNorm, LayerNorm))
    g = directions * norm.weight.double()
    if isinstance(norm, RMSNorm):
        return torch.rsqrt(x.square().mean() + norm.eps) * g, torch.zeros_like(g[..., 0])
    scale = torch.rsqrt(x.var(correction=0) + norm.eps)
    return scale * (g - g.mean(-1, keepdim=True)), directions @ norm.bias.double()


def _unembedding(
    model: CausalLM, target_ids: int | Sequence[int] | Tensor, against: int | Sequence[int] | Tensor | None
) -> Tensor:
    """W_U[target], or W_U[target] − W_U[against]: [..., D] float64, from the ranks that own the rows."""
    head = model.lm_head
    ids = [_token_ids("target_ids", target_ids, model.group.device)]
    if against is not None:
        ids.append(_against(_token_ids("against", against, model.group.device), ids[0]))
    asked = torch.cat([some.flatten() for some in ids])
    for token_id in asked.tolist():
        if not 0 <= token_id < head.vocab_size:
            raise RequestError(f"token id {token_id} is outside 0..{head.vocab_size - 1}")
    own = embedding_lookup(head.weight, asked, head.vocab_range.start, len(head.vocab_range))
    rows = model.group.communicator.all_reduce(own).double().split([some.numel() for some in ids])
    target, *other = (part.view(*some.shape, -1) for part, some in zip(rows, ids, strict=True))
    difference: Tensor = target - other[0] if other else target
    return difference


def _token_ids(what: str, given: int | Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """[...] int64 on the device."""
    try:
        ids = torch.as_tensor(given, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(f"{what} is {given!r}: token ids are whole numbers") from error
    if ids.dtype not in INTEGERS or not ids.numel():
        raise RequestError(f"{what} is {given!r}: give one token id or several, whole numbers")
    return ids.long()


def _against(ids: Tensor, targets: Tensor) -> Tensor:
    """One id for all targets as one without a shape."""
    if ids.numel() == 1:
        return ids.reshape(())
    if ids.shape != targets.shape:
        raise RequestError(f"against is {list(ids.shape)} for targets {list(targets.shape)}: give as many, or one")
    return ids


def _dense(weight: Tensor | Int8Weight) -> Tensor:
    """[out, in] float64."""
    if isinstance(weight, Int8Weight):
        return weight.rows(torch.arange(weight.shape[0], device=weight.values.device)).double()
    return weight.double()
