"""The choice of a token: the same at every degree, the arithmetic of transformers, the right distribution."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import RankPool

from tp.generation import GenerationOptions, SamplingParameters
from tp.generation.draws import uniform
from tp.generation.processors import LOWEST, best_columns, draw, likely_enough, nucleus, repetition_penalty
from tp.generation.sampler import Sampler
from tp.generation.scheduler import SequenceState
from tp.generation.scoring import token_logprobs
from tp.layers import ShardedLogits
from tp.parallel import TensorParallelGroup


def shard(whole: torch.Tensor, group: TensorParallelGroup, padding: float = 1e9) -> ShardedLogits:
    """This rank's columns of logits [R, V]; the padding would win every choice if it were let in."""
    vocab_size = whole.shape[-1]
    width = -(-vocab_size // group.size)
    padded = torch.nn.functional.pad(whole, (0, width * group.size - vocab_size), value=padding)
    local = padded[:, group.rank * width : (group.rank + 1) * width].to(group.device)
    return ShardedLogits(local, group, vocab_size)


def choose(
    group: TensorParallelGroup,
    whole: torch.Tensor,
    options: GenerationOptions,
    new_ids: list[list[int]] | None = None,
    end_ids: tuple[int, ...] = (),
) -> list[tuple[int, float]] | None:
    """One step for rows of logits; each row is a sequence with prompt [1, 2]."""
    torch.manual_seed(1000 + group.rank)
    states = [SequenceState(row, (1, 2), new_ids=new_ids[row] if new_ids else []) for row in range(len(whole))]
    sampler = Sampler(options, end_ids, whole.shape[-1])
    candidates = sampler.candidates(shard(whole, group), states)
    assert (candidates is None) == (group.rank != 0)
    return None if candidates is None else sampler.choose(candidates, states)


def sampling(**fields: Any) -> GenerationOptions:
    return GenerationOptions(sampling=SamplingParameters(**fields))


CHOICES: dict[str, GenerationOptions] = {
    "greedy": GenerationOptions(),
    "greedy, penalty": sampling(repetition_penalty=1.7),
    "plain": sampling(temperature=1.3, seed=4),
    "top-k": sampling(temperature=0.9, top_k=7, seed=5),
    "top-k of all": sampling(temperature=1.0, top_k=500, seed=5),
    "top-k, top-p, min-p": sampling(temperature=1.1, top_k=9, top_p=0.8, min_p=0.05, seed=6),
    "top-p": sampling(temperature=1.5, top_p=0.7, repetition_penalty=1.2, seed=7),
    "min-p": sampling(temperature=1.5, min_p=0.2, seed=8),
}


def _choose_all(group: TensorParallelGroup, whole: torch.Tensor) -> dict[str, list[tuple[int, float]] | None]:
    new_ids = [[row % whole.shape[-1], 3 * row % whole.shape[-1]] for row in range(len(whole))]
    return {name: choose(group, whole, options, new_ids) for name, options in CHOICES.items()}


@pytest.mark.parametrize("t", [2, 3, 4])
@pytest.mark.parametrize("dtype, vocab_size", [(torch.float32, 97), (torch.bfloat16, 97), (torch.bfloat16, 5)])
def test_the_choice_is_the_same_at_every_degree(ranks: RankPool, t: int, dtype: torch.dtype, vocab_size: int) -> None:
    """bfloat16 rows are full of equal logits; a vocabulary of 5 leaves rank 3 of 4 without a column."""
    generator = torch.Generator().manual_seed(3)
    whole = (3 * torch.randn(40, vocab_size, generator=generator)).to(dtype)
    expected = _choose_all(TensorParallelGroup.alone(), whole)
    chosen = ranks(t).run(_choose_all, whole)[0]
    log_softmax = whole.float().log_softmax(-1)
    for name, rows in expected.items():
        assert rows is not None
        assert [token for token, _ in chosen[name]] == [token for token, _ in rows], name
        exact = [log_softmax[row, token].item() for row, (token, _) in enumerate(rows)]
        for where in (rows, chosen[name]):
            assert [logprob for _, logprob in where] == pytest.approx(exact, abs=2e-6), name


def test_top_k_of_the_whole_vocabulary_draws_what_plain_sampling_draws() -> None:
    whole = 2 * torch.randn(50, 97, generator=torch.Generator().manual_seed(4))
    plain, top_k = (
        choose(TensorParallelGroup.alone(), whole, sampling(temperature=1.0, top_k=count)) for count in (0, 97)
    )
    assert plain is not None and top_k is not None
    assert [token for token, _ in plain] == [token for token, _ in top_k]
    assert (
        len(
            {
                token
                for token, _ in choose(TensorParallelGroup.alone(), whole[:1].expand(50, -1), CHOICES["plain"]) or []
            }
        )
        > 5
    )


def _greedy_and_samples(
    group: TensorParallelGroup, row: torch.Tensor, count: int
) -> tuple[Any, Any, int, torch.Tensor]:
    greedy = choose(group, row, GenerationOptions())
    calls = group.communicator.statistics.calls
    samples = choose(group, row.expand(count, -1), sampling(temperature=5.0))
    every_id = torch.arange(row.shape[-1], device=group.device)
    logprobs = token_logprobs(shard(row.expand(len(every_id), -1), group), every_id)
    return greedy, samples, calls, logprobs


def test_padding_is_never_chosen_though_all_logits_are_negative(ranks: RankPool) -> None:
    """Zero rows of padding have logit 0, which beats them all."""
    row = torch.tensor([[-1.0, -2.0, -3.0, -4.0, -0.5]])
    results = ranks(4).run(_greedy_and_samples, row, 10_000)
    greedy, samples, calls, _ = results[0]
    assert [token for token, _ in greedy] == [4]
    assert calls == 1  # candidates and normaliser in one collective
    counts = Counter(token for token, _ in samples)
    assert set(counts) <= set(range(5))
    expected = (row[0] / 5).softmax(-1)
    for token, probability in enumerate(expected.tolist()):
        spread = math.sqrt(10_000 * probability * (1 - probability))
        assert abs(counts[token] - 10_000 * probability) < 4 * spread
    for *_, logprobs in results:
        assert torch.equal(logprobs, results[0][3])
        assert logprobs.exp().sum().item() == pytest.approx(1, abs=1e-6)
        torch.testing.assert_close(logprobs.cpu(), row[0].log_softmax(-1), atol=1e-6, rtol=0)


def _bytes_of_a_choice(group: TensorParallelGroup, whole: torch.Tensor, options: GenerationOptions) -> int:
    group.communicator.statistics.reset()
    choose(group, whole, options)
    return group.communicator.statistics.bytes


@pytest.mark.parametrize("options", [GenerationOptions(), sampling(temperature=1.0, top_k=10, top_p=0.9, min_p=0.1)])
def test_greedy_and_top_k_do_not_gather_the_vocabulary(ranks: RankPool, options: GenerationOptions) -> None:
    whole = torch.randn(3, 1000)
    assert ranks(2).run(_bytes_of_a_choice, whole, options)[0] <= 3 * 2 * (2 + 3 * 10) * 4


def processed_by_transformers(scores: torch.Tensor, ids: torch.Tensor, parameters: SamplingParameters) -> torch.Tensor:
    from transformers.generation import logits_process as hf

    steps: list[Any] = [hf.RepetitionPenaltyLogitsProcessor(parameters.repetition_penalty)]
    steps.append(hf.MinNewTokensLengthLogitsProcessor(2, 6, [5, 11], device="cpu"))
    steps.append(hf.TemperatureLogitsWarper(parameters.temperature))
    steps.append(hf.TopKLogitsWarper(parameters.top_k or scores.shape[-1]))
    steps.append(hf.TopPLogitsWarper(parameters.top_p))
    steps.append(hf.MinPLogitsWarper(parameters.min_p))
    for step in steps:
        scores = step(ids, scores)
    return scores


@pytest.mark.parametrize(
    "parameters",
    [
        SamplingParameters(temperature=0.7),
        SamplingParameters(temperature=1.4, top_k=6),
        SamplingParameters(temperature=1.4, top_p=0.85),
        SamplingParameters(temperature=1.4, min_p=0.15),
        SamplingParameters(temperature=0.8, repetition_penalty=1.9),
        SamplingParameters(temperature=1.2, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=0.6),
    ],
    ids=str,
)
def test_the_distribution_is_that_of_transformers(parameters: SamplingParameters) -> None:
    """A grid of draws gives each token its probability; the second row has reached min_new_tokens 6, the first not."""
    generator = torch.Generator().manual_seed(11)
    logits = 2.5 * torch.randn(1, 61, generator=generator)
    logits[0, [5, 11]] = torch.tensor([1.0, 4.0])
    for count, masked in ((3, True), (6, False)):
        new_ids = logits[0].topk(6).indices.tolist()[:count]  # seen tokens, and likely ones
        ids = torch.tensor([[1, 2, *new_ids]])
        expected = processed_by_transformers(logits.clone(), ids, parameters).softmax(-1)[0]
        assert (expected[[5, 11]].max() == 0) >= masked
        states = [SequenceState(0, (1, 2), new_ids=new_ids)]
        options = GenerationOptions(sampling=parameters, min_new_tokens=6)
        sampler = Sampler(options, (5, 11), 61)
        candidates = sampler.candidates(ShardedLogits(logits, TensorParallelGroup.alone(), 61), states)
        assert candidates is not None
        scores = candidates.processed / parameters.temperature
        kept = nucleus(scores, parameters.top_p) & likely_enough(scores, parameters.min_p)
        grid = [(point + 0.5) / 20_000 for point in range(20_000)]
        columns = draw(scores.expand(len(grid), -1), kept.expand(len(grid), -1), grid)
        drawn = torch.bincount(candidates.ids[0, columns], minlength=61) / len(grid)
        torch.testing.assert_close(drawn, expected, atol=1e-4, rtol=0)
        assert set(drawn.nonzero().flatten().tolist()) <= set(expected.nonzero().flatten().tolist())


def test_greedy_with_penalty_and_masked_end_ids_as_transformers() -> None:
    logits = torch.tensor([[4.0, -1.0, 3.0, 3.9, 5.0, 8.0]])
    options = GenerationOptions(sampling=SamplingParameters(repetition_penalty=2.0), min_new_tokens=3)
    # 5 is an end id, masked; 4 and 2 have been seen: 5/2 and 3/2, so 0 wins with 4.
    (token, logprob), *_ = choose(TensorParallelGroup.alone(), logits, options, [[4, 2]], end_ids=(5,)) or []
    assert token == 0
    assert logprob == pytest.approx(logits.log_softmax(-1)[0, 0].item(), abs=1e-6)
    penalised = repetition_penalty(torch.tensor([[2.0, -2.0, 1.0]]), torch.tensor([[True, True, False]]), 2.0)
    assert penalised.tolist() == [[1.0, -4.0, 1.0]]


@given(
    st.lists(st.sampled_from([-1.5, -0.0, 0.0, 1e-40, -1e-40, 2.25, LOWEST, -math.inf, 3e38]), min_size=1), st.data()
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_of_equal_values_the_lowest_columns_come_first(values: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(values)))
    expected = sorted(range(len(values)), key=lambda column: (-values[column], column))[:count]
    assert best_columns(torch.tensor([values]), count)[0].tolist() == expected


def test_top_p_looks_beyond_its_prefix() -> None:
    """A flat distribution over more columns than the first look takes in, every probability equal."""
    flat = torch.zeros(2, 4096)
    kept = nucleus(flat, 0.5)
    assert kept.sum(-1).tolist() == [2048, 2048]
    assert kept[:, :2048].all()
    assert nucleus(torch.tensor([[0.0, 50.0, 1.0]]), 1e-6).tolist() == [[False, True, False]]


def test_draws_at_the_ends_of_the_interval() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 1.0, 0.0]])
    kept = torch.tensor([[False, True, False, True, False]])
    ends = [0.0, 0.4999, 0.5, math.nextafter(1, 0), 1.0]
    columns = draw(logits.expand(5, -1), kept.expand(5, -1), ends)
    assert columns.tolist() == [1, 1, 3, 3, 3]


def test_uniform_is_fixed_by_its_arguments_and_is_uniform() -> None:
    assert uniform(1, 2, 3) == uniform(1, 2, 3)
    assert len({uniform(1, 2, 3), uniform(2, 1, 3), uniform(1, 3, 2), uniform(3, 2, 1)}) == 4
    draws = sorted(uniform(7, sequence, step) for sequence in range(50) for step in range(200))
    assert draws[0] >= 0 and draws[-1] < 1
    furthest = max(abs(value - (rank + 0.5) / 10_000) for rank, value in enumerate(draws))
    assert furthest < 1.63 / 100  # Kolmogorov-Smirnov at 1 %


def test_extreme_temperatures() -> None:
    logits = torch.tensor([[90.0, 100.0, 99.0]]).repeat(200, 1)
    alone = TensorParallelGroup.alone()
    assert {token for token, _ in choose(alone, logits, sampling(temperature=1e-38)) or []} == {1}
    assert {token for token, _ in choose(alone, logits, sampling(temperature=1e6)) or []} == {0, 1, 2}


@pytest.mark.parametrize("options", [GenerationOptions(), sampling(temperature=1.0)])
def test_logits_that_are_not_finite_have_no_log_probability(options: GenerationOptions) -> None:
    for value in (math.nan, math.inf, -math.inf):
        logits = torch.tensor([[0.0, value, 1.0], [0.0, 2.0, 1.0]])
        (_, first), (_, second) = choose(TensorParallelGroup.alone(), logits, options) or []
        assert math.isnan(first) and math.isfinite(second)
