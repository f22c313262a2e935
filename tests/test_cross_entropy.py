"""The loss over a split vocabulary against torch's own, values and gradients, at every degree."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tp.errors import LayoutError, RequestError
from tp.layers import ParallelLMHead, ShardedLogits
from tp.layers.parameter import named_parts
from tp.parallel import TensorParallelGroup
from tp.training import chunked_head_cross_entropy, vocab_parallel_cross_entropy


def shard(whole, group):
    """This rank's columns, padded with what would win any argmax or softmax that saw it."""
    width = -(-whole.shape[-1] // group.size)
    own = whole[..., group.rank * width : (group.rank + 1) * width]
    padding = own.new_full((*own.shape[:-1], width - own.shape[-1]), 1e4)
    return torch.cat([own, padding], -1)


def _loss(group, whole, labels, options):
    local = shard(whole, group).requires_grad_()
    before = group.communicator.statistics.calls
    loss = vocab_parallel_cross_entropy(ShardedLogits(local, group, whole.shape[-1]), labels, **options)
    forward = group.communicator.statistics.calls - before
    loss.backward()
    backward = group.communicator.statistics.calls - before - forward
    width = max(0, min(local.shape[1], whole.shape[-1] - group.rank * local.shape[1]))
    return loss.item(), local.grad[:, :width], local.grad[:, width:], forward, backward


def test_a_known_value(ranks):
    """Whole logits given to a sharded loss would give 1.1333369, too large by log 2."""
    whole, labels = torch.tensor([[0.0, 1, 2, 3]]), torch.tensor([3])
    outcomes = ranks(2).run(_loss, whole, labels, {})
    for loss, *_ in outcomes:
        assert loss == pytest.approx(0.4401897, abs=1e-6)
    gradient = torch.cat([gradient for _, gradient, *_ in outcomes], -1)
    expected = torch.tensor([[0.0320586, 0.0871443, 0.2368828, -0.3560857]])
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("vocab", [97, 5])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("t", [1, 2, 3, 4])
def test_equals_torch(ranks, t, smoothing, vocab):
    generator = torch.Generator().manual_seed(vocab)
    whole = torch.randn(11, vocab, generator=generator, dtype=torch.float64) * 4 - 30
    labels = torch.randint(0, vocab, (11,), generator=generator)
    labels[[2, 5]] = -100
    reference = whole.clone().requires_grad_()
    expected = functional.cross_entropy(reference, labels, label_smoothing=smoothing)
    expected.backward()
    outcomes = ranks(t).run(_loss, whole, labels, {"label_smoothing": smoothing})
    for loss, _, padding, forward, backward in outcomes:
        assert loss == pytest.approx(expected.item(), rel=1e-13)
        assert not padding.any()
        assert (forward, backward) == ((1, 0) if t > 1 else (0, 0))
    gradient = torch.cat([gradient for _, gradient, *_ in outcomes], -1)
    torch.testing.assert_close(gradient, reference.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("t", [1, 2, 4])
def test_no_valid_label_gives_zero_and_zero_gradients(ranks, t):
    for loss, gradient, *_ in ranks(t).run(_loss, torch.randn(3, 5), torch.full((3,), -100), {}):
        assert loss == 0.0
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_other_ignore_index_and_low_precision(ranks):
    whole = (torch.randn(6, 33, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    labels = torch.tensor([0, 7, 32, 7, 16, 31])
    expected = functional.cross_entropy(whole.float(), labels, ignore_index=7)
    for loss, gradient, *_ in ranks(3).run(_loss, whole, labels, {"ignore_index": 7}):
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        assert gradient.dtype == torch.bfloat16


def _refused(group, labels):
    logits = ShardedLogits(torch.zeros(2, 3), group, 5)
    try:
        vocab_parallel_cross_entropy(logits, torch.tensor(labels))
    except RequestError as error:
        return str(error)


@pytest.mark.parametrize(
    "labels, message",
    [
        ([4, 5], r"1 labels are outside 0..4 (here [5])"),
        ([-1, 9], "2 labels are outside 0..4"),
        ([1, 2, 3], "labels are (3,), logits (2, 3)"),
    ],
)
def test_bad_labels_are_refused_on_every_rank(ranks, labels, message):
    assert all(message in outcome for outcome in ranks(2).run(_refused, labels))


def test_whole_logits_are_refused_by_type():
    with pytest.raises(LayoutError, match="takes ShardedLogits, not a Tensor of whole logits"):
        vocab_parallel_cross_entropy(torch.zeros(2, 5), torch.tensor([1, 2]))


def _data_parallel(group, whole, labels):
    """Two data-parallel ranks with tokens of their own, each alone in its tensor-parallel group."""
    alone = TensorParallelGroup.alone()
    local = whole[group.rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(
        ShardedLogits(local, alone, whole.shape[-1]), labels[group.rank], data_parallel_group=group
    )
    loss.backward()
    return loss.item(), local.grad


def test_the_mean_is_over_the_labels_of_all_data_parallel_ranks(ranks):
    generator = torch.Generator().manual_seed(2)
    whole = torch.randn(2, 4, 9, generator=generator, dtype=torch.float64)
    labels = torch.tensor([[1, -100, -100, -100], [3, 8, 0, 2]])
    reference = whole.clone().requires_grad_()
    expected = functional.cross_entropy(reference.flatten(0, 1), labels.flatten())
    expected.backward()
    outcomes = ranks(2).run(_data_parallel, whole, labels)
    assert sum(loss for loss, _ in outcomes) == pytest.approx(expected.item(), rel=1e-13)
    torch.testing.assert_close(torch.stack([gradient for _, gradient in outcomes]), reference.grad)


def _chunked(group, table, x, labels, chunk_size):
    results = []
    for chunked in (True, False):
        head = ParallelLMHead(*table.shape, group, dtype=x.dtype)
        for parameter in named_parts(torch.nn.ModuleDict({"head": head})):
            for part in parameter.parts:
                parameter.slice_of(part).data.copy_(table.narrow(0, part.global_start, part.length))
        states = x.clone().requires_grad_()
        if chunked:
            loss = chunked_head_cross_entropy(head, states, labels, chunk_size=chunk_size, label_smoothing=0.1)
        else:
            loss = vocab_parallel_cross_entropy(head(states), labels, label_smoothing=0.1)
        (3 * loss).backward()
        results.append((loss.detach(), states.grad, head.weight.grad))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_the_chunked_form_equals_the_plain_one(ranks, chunk_size):
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(23, 6, generator=generator, dtype=torch.float64)
    x = torch.randn(9, 6, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 22, 5, -100, 7, 7, 11, 12, 3])
    ranks(3).run(_chunked, table, x, labels, chunk_size)


def test_the_chunked_form_holds_one_chunk_of_logits(monkeypatch):
    from tp.training import cross_entropy

    largest = 0
    inner = cross_entropy._loss_and_gradient

    def watch(logits, *arguments):
        nonlocal largest
        largest = max(largest, logits.local.shape[0])
        return inner(logits, *arguments)

    monkeypatch.setattr(cross_entropy, "_loss_and_gradient", watch)
    head = ParallelLMHead(11, 4, TensorParallelGroup.alone())
    chunked_head_cross_entropy(head, torch.randn(50, 4), torch.zeros(50, dtype=torch.long), chunk_size=8)
    assert largest == 8


def test_a_rank_without_columns_does_not_take_part_in_the_maximum(ranks):
    """Five columns on four ranks: a maximum of 0 from the empty one would let every exponential of −300 vanish."""
    whole = torch.linspace(-310.0, -300.0, 15).view(3, 5)
    labels = torch.tensor([4, 0, 2])
    expected = functional.cross_entropy(whole, labels)
    for loss, gradient, *_ in ranks(4).run(_loss, whole, labels, {}):
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        assert gradient.isfinite().all()
