"""The same sequences at every degree, in every batch, in waves and in chunks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from generation_models import VOCAB_SIZE, tiny_model
from pool import RankPool

from tp.generation import GenerationOptions, SamplingParameters, Timings
from tp.parallel import TensorParallelGroup

WINDOWED = {"model_type": "mistral", "qkv_bias": False, "sliding_windows": (7, 7)}


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(21)
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def one_by_one(
    group: TensorParallelGroup, prompts: list[list[int]], count: int, config: dict[str, Any]
) -> list[tuple[list[int], list[float]]]:
    """Greedy without a cache, each prompt alone: the whole sequence runs again for each token."""
    model = tiny_model(group, config)
    sequences = []
    for prompt in prompts:
        ids, logprobs = list(prompt), []
        for _ in range(count):
            logits = model(torch.tensor([ids], device=group.device))[0, -1].float()
            ids.append(int(logits.argmax()))
            logprobs.append(logits.log_softmax(-1)[ids[-1]].item())
        sequences.append((ids[len(prompt) :], logprobs))
    return sequences


def generated(
    group: TensorParallelGroup,
    prompts: list[list[int]] | None,
    options: GenerationOptions,
    config: dict[str, Any] | None = None,
    **model_options: Any,
) -> list[tuple[list[int], list[float]]]:
    """New ids and log-probabilities of each sequence; every rank has random state of its own."""
    model = tiny_model(group, config, **model_options)
    torch.manual_seed(77 + group.rank)
    result = model.generate(prompts if group.rank == 0 else None, options)
    assert [sequence.index for sequence in result.sequences] == list(range(len(result.sequences)))
    return [(list(sequence.new_ids), list(sequence.logprobs)) for sequence in result.sequences]


CASES = {"full attention": {}, "window of 7": WINDOWED}
LENGTHS = [(2, 5, 9), (1, 5, 17)]
GREEDY = GenerationOptions(20, prefill_chunk=6)
Sequences = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def expected(ranks: RankPool) -> dict[str, list[Sequences]]:
    """What one rank gives without a cache, for each case and each set of lengths."""
    sequences = {
        name: [ranks(1).run(one_by_one, prompts_of(*lengths), 20, config)[0] for lengths in LENGTHS]
        for name, config in CASES.items()
    }
    assert all(len(set(ids)) > 5 for of_case in sequences.values() for batch in of_case for ids, _ in batch)
    return sequences


def _generated_batches(group: TensorParallelGroup, config: dict[str, Any]) -> list[Sequences]:
    return [generated(group, prompts_of(*lengths), GREEDY, config) for lengths in LENGTHS]


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("t", [1, 2, 3, 4])
def test_a_batch_gives_what_each_prompt_gives_alone_without_a_cache(
    ranks: RankPool, expected: dict[str, list[Sequences]], t: int, case: str
) -> None:
    for of_rank in ranks(t).run(_generated_batches, CASES[case]):
        for batch, expected_batch in zip(of_rank, expected[case], strict=True):
            for (ids, logprobs), (expected_ids, expected_logprobs) in zip(batch, expected_batch, strict=True):
                assert ids == expected_ids
                assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)


def _penalised(group: TensorParallelGroup) -> Any:
    return generated(group, prompts_of(3, 6), PENALISED)[1][0]


PENALISED = GenerationOptions(20, sampling=SamplingParameters(repetition_penalty=1.5))


def _penalised_without_a_cache(group: TensorParallelGroup) -> list[int]:
    model, prompt = tiny_model(group), prompts_of(3, 6)[1]
    ids = list(prompt)
    for _ in range(20):
        logits = model(torch.tensor([ids], device=group.device))[0, -1]
        for token in set(ids):
            logits[token] = logits[token] / 1.5 if logits[token] > 0 else logits[token] * 1.5
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def test_the_penalty_follows_the_new_tokens(ranks: RankPool) -> None:
    expected = ranks(1).run(_penalised_without_a_cache)[0]
    assert len(set(expected)) > 10
    assert ranks(3).run(_penalised) == [expected] * 3


SAMPLED = GenerationOptions(32, sampling=SamplingParameters(temperature=1.0, seed=9))
CONFIGURATIONS: dict[str, tuple[GenerationOptions, dict[str, Any]]] = {
    "one batch": (SAMPLED, {}),
    "two slots, chunks of 3": (
        GenerationOptions(32, sampling=SAMPLED.sampling, prefill_chunk=3),
        {"max_batch_size": 2},
    ),
    "one slot": (SAMPLED, {"max_batch_size": 1}),
    "a long context": (SAMPLED, {"max_batch_size": 9, "max_context": 100}),
}


def _generated_every_way(group: TensorParallelGroup) -> dict[str, list[list[int]]]:
    prompts = prompts_of(3, 1, 8, 2)
    return {
        name: [ids for ids, _ in generated(group, prompts, options, None, **model_options)]
        for name, (options, model_options) in CONFIGURATIONS.items()
    }


def _other_draws(group: TensorParallelGroup) -> list[list[int]]:
    options = GenerationOptions(32, sampling=SamplingParameters(temperature=1.0, seed=10))
    return [ids for ids, _ in generated(group, prompts_of(3, 1, 8, 2), options)]


@pytest.fixture(scope="module")
def draws(ranks: RankPool) -> list[list[int]]:
    sequences = ranks(1).run(_generated_every_way)[0]["one batch"]
    assert all(len(ids) == 32 for ids in sequences)
    assert all(ids != other for ids, other in zip(sequences, ranks(1).run(_other_draws)[0], strict=True))
    return sequences


@pytest.mark.parametrize("t", [1, 2, 4])
def test_draws_do_not_depend_on_ranks_batch_waves_or_chunks(ranks: RankPool, draws: list[list[int]], t: int) -> None:
    """Each rank's own random state differs; what is drawn depends on seed, sequence and step alone."""
    for of_rank in ranks(t).run(_generated_every_way):
        for name, ids in of_rank.items():
            assert ids == draws, name


def _rows_through_the_head(group: TensorParallelGroup, prompts: list[list[int]], chunk: int) -> tuple[Any, ...]:
    model = tiny_model(group, dtype=torch.float64)
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(len(output.local)))
    tokens: list[int] = []
    model.model.register_forward_hook(lambda module, inputs, output: tokens.append(inputs[0].num_tokens))
    result = model.generate(prompts, GenerationOptions(3, prefill_chunk=chunk))
    first = result.sequences[0]
    whole = model(torch.tensor([prompts[0]], device=group.device))[0, -1]
    return rows[:-1], tokens[:-1], first.logprobs[0], whole.log_softmax(-1)[first.new_ids[0]].item()


@pytest.mark.parametrize(
    "lengths, chunk, rows, tokens",
    [
        ((64,), 512, [1, 1, 1], [64, 1, 1]),
        ((64,), 20, [1, 1, 1], [20, 20, 20, 4, 1, 1]),
        ((64, 5, 3), 512, [3, 3, 3], [72, 3, 3]),
    ],
)
def test_only_last_positions_go_through_the_head(
    ranks: RankPool, lengths: tuple[int, ...], chunk: int, rows: list[int], tokens: list[int]
) -> None:
    for head_rows, step_tokens, logprob, expected in ranks(2).run(_rows_through_the_head, prompts_of(*lengths), chunk):
        assert (head_rows, step_tokens) == (rows, tokens)
        assert logprob == pytest.approx(expected, abs=1e-6)


def _collectives_of_a_decode_step(group: TensorParallelGroup) -> list[int]:
    model = tiny_model(group)
    calls = []
    with model.generate_stream([[5, 6, 7]], GenerationOptions(4)) as stream:
        for _ in stream:
            calls.append(group.communicator.statistics.calls)
    return [after - before for before, after in itertools.pairwise(calls)]


def test_a_decode_step_adds_two_collectives_to_those_of_the_layers(ranks: RankPool) -> None:
    reduces = 1 + 2 * 2  # the embedding, and two sublayers in each of two layers
    assert ranks(2).run(_collectives_of_a_decode_step)[0] == [reduces + 2] * 3


def _timed(group: TensorParallelGroup) -> list[tuple[Timings, int]]:
    model = tiny_model(group)
    results = [model.generate(prompts_of(4, 2), GenerationOptions(10)), model.generate([[1]], GenerationOptions(1))]
    results.append(tiny_model(group, max_batch_size=3, max_context=50).generate(prompts_of(4, 2), GenerationOptions(2)))
    return [(result.timings, result.kv_bytes) for result in results]


def test_timings_and_cache_bytes(ranks: RankPool) -> None:
    for (timings, kv_bytes), (of_one_token, _), (_, preallocated) in ranks(2).run(_timed):
        assert 0 < timings.ttft_s < 5
        assert 0 < timings.tpot_s < 1
        # Two tokens a step; the time between tokens has what lies between steps on top of the steps themselves.
        assert timings.tokens_per_s >= 0.9 * 2 / timings.tpot_s
        assert kv_bytes == 2 * 2 * 1 * 8 * 4 * (2 * 14)  # k and v, layers, own heads, width, float32, slots of 4 + 10
        assert preallocated == 2 * 2 * 1 * 8 * 4 * (3 * 50)
        assert (of_one_token.tpot_s, of_one_token.tokens_per_s) == (0, 0)
