"""What is not finite ends the run on all ranks with one error that names the sublayer where it first arises."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_models import tiny_config
from pool import RankPool
from safetensors.torch import load_file, save_file
from tiny_models import write_checkpoint
from torch import Tensor

from tp.errors import NumericalError
from tp.generation import GenerationOptions, LanguageModel, SamplingParameters, score
from tp.generation import engine as engine_module
from tp.generation import not_finite as not_finite_module
from tp.generation.decode_graphs import DecodeGraphs
from tp.kernels import attention as attention_module
from tp.layers.layout import Replicate, ShardTokens
from tp.layers.parameter import named_parts
from tp.models import CausalLM, initialise_parameters
from tp.parallel import TensorParallelGroup
from tp.parallel.partition import uniform_runs
from tp.training.data import TrainingBatch
from tp.training.not_finite import ADVICE
from tp.training.optimizer import adamw
from tp.training.schedule import CosineSchedule
from tp.training.train_step import Learner
from tp.training.trainer import Trainer, TrainingSchedule

ROOT = Path(__file__).parent.parent
LIMIT_S = 30.0
PROMPT = [5, 80, 17, 42, 9]
LAYOUTS = {"replicate": Replicate, "shard": ShardTokens}
DEGREES = (1, 2, 3)

CULPRITS = {
    "model.embed_tokens.weight": "the embedding",
    "model.layers.0.input_layernorm.weight": "the attention of layer 0",
    "model.layers.0.self_attn.q_proj.weight": "the attention of layer 0",
    "model.layers.1.self_attn.o_proj.weight": "the attention of layer 1",
    "model.layers.0.post_attention_layernorm.weight": "the MLP of layer 0",
    "model.layers.1.mlp.up_proj.weight": "the MLP of layer 1",
    "model.layers.1.mlp.down_proj.weight": "the MLP of layer 1",
    "model.norm.weight": "the final norm",
    "lm_head.weight": "the LM head",
}
"""A weight, one element of which is NaN, and the sublayer to be named."""


def _model(group: TensorParallelGroup, layout: str = "replicate", **config: Any) -> LanguageModel:
    model = LanguageModel(
        tiny_config(num_attention_heads=6, num_kv_heads=3, tie_word_embeddings=False, **config), group
    )
    initialise_parameters(model, seed=0, std=0.4)
    model.model.choose_layout = LAYOUTS[layout]
    return model


@torch.no_grad()
def _poison(model: CausalLM, name: str, value: float, row: int) -> None:
    """Sets element [row, 0] of the whole tensor, on the ranks that hold it."""
    for parameter in named_parts(model):
        for part in parameter.parts:
            if part.name != name:
                continue
            own = parameter.slice_of(part)
            start = part.global_start
            at_row = row - start if part.dim == 0 else row
            if own.dim() == 1:
                own[0] = value
            elif 0 <= at_row < own.shape[0] and (part.dim == 0 or start == 0):
                own[at_row, 0] = value


def _message(action: Any) -> str:
    with pytest.raises(NumericalError) as caught:
        action()
    assert type(caught.value) is NumericalError and caught.value.exit_code == 8
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- generate and score ---


def _every_culprit(group: TensorParallelGroup, layout: str) -> dict[str, tuple[str, str, list[int]]]:
    """What generate and score say of each, and what the model generates once it is mended."""
    model = _model(group, layout)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    told = {}
    for name in CULPRITS:
        _poison(model, name, math.nan, row=PROMPT[3] if "embed" in name else 0)
        messages = [
            _message(lambda: model.generate([PROMPT[:2], PROMPT], GenerationOptions(3, prefill_chunk=2))),
            _message(lambda: score(model, PROMPT)),
        ]
        model.load_state_dict(whole)
        told[name] = (*messages, list(model.generate([PROMPT], GenerationOptions(3)).sequences[0].new_ids))
    return told


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("t", DEGREES)
def test_the_sublayer_is_named_on_every_rank(ranks: RankPool, t: int, layout: str) -> None:
    by_rank = ranks(t).run(_every_culprit, layout, timeout_s=LIMIT_S)
    assert all(told == by_rank[0] for told in by_rank)
    for name, where in CULPRITS.items():
        generated, scored, after = by_rank[0][name]
        sequence = 1 if "embed" in name else 0
        assert generated.startswith(
            f"the logits of sequence {sequence} at new token 0 are not finite, first NaN is in "
        )
        assert scored.startswith("the logits after token ") and "are not finite, first NaN is in " in scored
        assert f" in {where}: try dtype" in generated, name
        assert f" in {where}: try dtype" in scored, name
        assert len(after) == 3 and after == by_rank[0]["lm_head.weight"][2]


def _in_decode(group: TensorParallelGroup, layout: str, last: int) -> tuple[str, bool, list[int]]:
    """A model whose weights spoil after `last` new tokens: the step that meets them has been captured by then."""
    model = _model(group, layout)
    captured = []
    seen: list[int] = []
    run = DecodeGraphs.next_token_logits

    def watched(self: DecodeGraphs, step: Any) -> Any:
        captured.append(bool(self._captured))
        return run(self, step)

    DecodeGraphs.next_token_logits = watched  # type: ignore[method-assign]
    try:
        stream = model.generate_stream([PROMPT], GenerationOptions(12))
        seen += [next(stream).token_id for _ in range(last)]
        _poison(model, "model.layers.1.mlp.down_proj.weight", math.inf, row=3)
        message = _message(lambda: seen.append(next(stream).token_id))
        assert next(stream, None) is None
    finally:
        DecodeGraphs.next_token_logits = run  # type: ignore[method-assign]
    return message, bool(captured and captured[-1]), seen


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("t", DEGREES)
def test_in_replayed_decode_steps(ranks: RankPool, t: int, layout: str) -> None:
    """inf · 0 and inf − inf may make it NaN within the same sublayer."""
    by_rank = ranks(t).run(_in_decode, layout, 6, timeout_s=LIMIT_S)
    assert all(of_rank == by_rank[0] for of_rank in by_rank)
    message, replayed, seen = by_rank[0]
    assert len(seen) == 6
    assert "sequence 0 at new token 6 are not finite" in message
    assert " is in the MLP of layer 1: try dtype" in message
    assert replayed or layout == "shard"


def _minus_infinity_in_a_column(group: TensorParallelGroup) -> list[str]:
    """A token that nothing would choose: the chosen one has a finite probability."""
    model = _model(group, vocab_size=97)
    with torch.no_grad():
        model.model.norm.weight.abs_()
    hook = model.lm_head.register_forward_hook(_spoiling(group, 96, -math.inf))
    told = [
        _message(lambda: model.generate([PROMPT], GenerationOptions(2))),
        _message(lambda: model.generate([PROMPT], GenerationOptions(2, sampling=SamplingParameters(temperature=1.0)))),
        _message(lambda: model.generate([PROMPT], GenerationOptions(2, sampling=SamplingParameters(1.0, top_k=3)))),
        _message(lambda: score(model, PROMPT)),
    ]
    hook.remove()
    return told


def _spoiling(group: TensorParallelGroup, token_id: int, value: float) -> Any:
    def spoil(module: Any, arguments: Any, logits: Any) -> None:
        column = token_id - logits.vocab_start_index
        if 0 <= column < logits.num_valid:
            logits.local[..., column] = value

    return spoil


@pytest.mark.parametrize("t", DEGREES)
def test_one_logit_of_minus_infinity_is_enough(ranks: RankPool, t: int) -> None:
    for told in ranks(t).run(_minus_infinity_in_a_column, timeout_s=LIMIT_S):
        assert all("are not finite, first infinity is in the LM head: " in message for message in told)


def _only_the_second_sequence(group: TensorParallelGroup) -> str:
    model = _model(group)
    _poison(model, "model.embed_tokens.weight", math.nan, row=80)
    return _message(lambda: model.generate([[5, 6, 7], PROMPT], GenerationOptions(3)))


def test_the_sequence_is_named(ranks: RankPool) -> None:
    for message in ranks(2).run(_only_the_second_sequence, timeout_s=LIMIT_S):
        assert message.startswith(
            "the logits of sequence 1 at new token 0 are not finite, first NaN is in the embedding"
        )


def _that_does_not_come_again(group: TensorParallelGroup) -> str:
    model = _model(group)
    calls = []

    def once(module: Any, arguments: Any, logits: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            logits.local.fill_(math.nan)

    hook = model.lm_head.register_forward_hook(once)
    message = _message(lambda: model.generate([PROMPT], GenerationOptions(3)))
    hook.remove()
    return message


def test_what_a_second_pass_does_not_show_is_said(ranks: RankPool) -> None:
    for message in ranks(2).run(_that_does_not_come_again, timeout_s=LIMIT_S):
        assert "are not finite, in a second pass every sublayer was finite: " in message


def test_nothing_is_looked_for_while_all_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second pass is the only one with a tap, and is not made."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("looked for a culprit of nothing")

    monkeypatch.setattr(engine_module, "not_finite", refuse)
    monkeypatch.setattr(not_finite_module, "locate_non_finite", refuse)
    model = _model(TensorParallelGroup.alone())
    assert len(model.generate([PROMPT], GenerationOptions(9)).sequences[0].new_ids) == 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_queries", [1, 4])
@pytest.mark.parametrize("kernel", ["native", "plain"])
def test_attention_of_what_is_nan_is_nan(
    kernel: str, num_queries: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own kernel for CPUs makes 0 of a query that is NaN; the other rows are as they were."""
    if kernel == "plain":
        monkeypatch.setattr(attention_module, "has_prefill_attention", lambda *operands: False)
    runs = uniform_runs(6, 3, 1, 0)
    q, k, v = (
        torch.randn(heads, 4, 8, generator=torch.Generator().manual_seed(heads)).to(dtype) for heads in (6, 3, 3)
    )
    q = q[:, -num_queries:]
    with torch.no_grad():
        finite = attention_module.causal_attention(q, k, v, runs)
        assert finite.isfinite().all()
        for spoilt, heads in ((q, [4]), (k, [4, 5]), (v, [4, 5])):
            row = spoilt[4 if spoilt is q else 2, -1]
            kept, row[3] = row[3].clone(), math.nan
            z = attention_module.causal_attention(q, k, v, runs)
            row[3] = kept
            bad = (~z.isfinite()).any(-1)[:, -1].nonzero().flatten().tolist()
            assert bad == heads
            assert torch.equal(z[:4], finite[:4])


# --- training ---


def _batch(seed: int) -> TrainingBatch:
    ids = torch.randint(0, 97, (12,), generator=torch.Generator().manual_seed(seed))
    return TrainingBatch(ids[:-1], ids[1:], (4, 7))


def _training_model(group: TensorParallelGroup, layout: str) -> Learner:
    model = CausalLM(tiny_config(num_attention_heads=6, num_kv_heads=3, tie_word_embeddings=False), group)
    initialise_parameters(model, seed=0, std=0.1)
    model.model.choose_layout = LAYOUTS[layout]
    return Learner(model, adamw(model, learning_rate=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1))


def _every_culprit_in_training(group: TensorParallelGroup, layout: str) -> dict[str, tuple[str, str]]:
    """Of a step and an evaluation; parameters stay as they were, and training goes on once they are mended."""
    learner = _training_model(group, layout)
    batches = [_batch(1), _batch(2)]
    learner.step(batches, 1e-3)
    whole = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    told = {}
    for name in CULPRITS:
        _poison(learner.model, name, math.nan, row=int(batches[1].token_ids[3]) if "embed" in name else 0)
        spoilt = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
        told[name] = (
            _message(lambda: learner.step(batches, 1e-3)),
            _message(lambda: learner.evaluate(batches)),
        )
        for key, tensor in learner.model.state_dict().items():
            torch.testing.assert_close(tensor, spoilt[key], rtol=0, atol=0, equal_nan=True)
        learner.model.load_state_dict(whole)
    assert math.isfinite(learner.step(batches, 1e-3).loss)
    return told


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("t", DEGREES)
def test_the_sublayer_is_named_in_training(ranks: RankPool, t: int, layout: str) -> None:
    by_rank = ranks(t).run(_every_culprit_in_training, layout, timeout_s=LIMIT_S)
    assert all(told == by_rank[0] for told in by_rank)
    for name, where in CULPRITS.items():
        step, evaluation = by_rank[0][name]
        assert step.startswith("loss is ")
        assert step.endswith(f", gradient norm nan, first NaN is in {where}: {ADVICE}"), name
        assert evaluation.startswith(f"evaluation loss is nan, first NaN is in {where}: "), name


class _InfiniteBackward(torch.autograd.Function):
    """The identity forward; the gradient that comes backward is kept in `seen`, and goes on infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[list[float]]) -> Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.seen.append(gradient.flatten().tolist())
        return gradient * math.inf, None


def _spoil_gradient(learner: Learner) -> list[list[float]]:
    """Of what layer 1's MLP reads; gives what comes there, in each backward."""
    seen: list[list[float]] = []

    def spoil(module: Any, arguments: Any) -> Any:
        (normed,) = arguments
        return replace(normed, local=_InfiniteBackward.apply(normed.local, seen))  # type: ignore[no-untyped-call]

    learner.model.model.layers[1].mlp.register_forward_pre_hook(spoil)
    return seen


def _a_gradient(group: TensorParallelGroup, layout: str) -> str:
    learner = _training_model(group, layout)
    _spoil_gradient(learner)
    return _message(lambda: learner.step([_batch(1)], 1e-3))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("t", DEGREES)
def test_a_gradient_is_named_where_it_first_arises(ranks: RankPool, t: int, layout: str) -> None:
    """The backward of layer 1's MLP makes it; it comes to light in the state that the MLP reads."""
    for message in ranks(t).run(_a_gradient, layout, timeout_s=LIMIT_S):
        assert "the gradient of the residual stream after the attention of layer 1" in message
        assert not message.startswith("loss is nan")


def _gradients_of_both_backwards(group: TensorParallelGroup) -> list[list[float]]:
    """Of two replicas with dropout: what comes into layer 1's MLP in the step, and in the search for the culprit."""
    learner = _training_model(TensorParallelGroup.alone(), "replicate")
    learner = Learner(learner.model, learner.optimizer, group)
    for layer in learner.model.model.layers:
        layer.self_attn.dropout_probability = 0.5
    seen = _spoil_gradient(learner)
    _message(lambda: learner.step([_batch(group.rank)], 1e-3, dropout_seed=7))
    return seen


def test_the_culprit_is_looked_for_in_the_very_backward_that_failed(ranks: RankPool) -> None:
    for first, second in ranks(2).run(_gradients_of_both_backwards, timeout_s=LIMIT_S):
        assert first == second and any(first)


def _trainer_stops(group: TensorParallelGroup) -> tuple[str, list[int], list[int]]:
    learner = _training_model(group, "shard")
    saved: list[int] = []
    seen: list[int] = []

    def batches(step: int) -> list[TrainingBatch]:
        if step == 2:
            _poison(learner.model, "model.layers.1.self_attn.o_proj.weight", math.nan, row=0)
        return [_batch(step)]

    trainer = Trainer(
        learner,
        group,
        learning_rate=CosineSchedule(1e-3, 1e-4, 1, 5),
        batches=batches,
        evaluation=None,
        schedule=TrainingSchedule(5, save_every=2),
        save=saved.append,
        on_metrics=lambda metrics: seen.append(metrics.step),
    )
    return _message(trainer.run), saved, seen


def test_a_run_ends_with_its_step_and_saves_nothing_more(ranks: RankPool) -> None:
    for message, saved, seen in ranks(3).run(_trainer_stops, timeout_s=LIMIT_S):
        assert message.startswith("step 3: loss is nan, gradient norm nan, first NaN is in the attention of layer 1: ")
        assert (saved, seen) == ([2], [1, 2])


# --- commands ---


def _command(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "launch", *arguments, "--device", "cpu"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    return run.returncode, run.stderr


@pytest.mark.long
@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize("command", [("generate", "--prompt-ids"), ("score", "--ids")])
def test_a_command_ends_with_status_8_and_one_line(command: tuple[str, str], t: int, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][7, 3] = math.nan
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    name, ids = command
    status, told = _command(name, "--model", str(path), ids, "1,2,3,4", "--tp", str(t))
    assert status == 8, told
    assert told.startswith("error: the logits ") and told.count("\n") == 1
    assert "first NaN is in the MLP of layer 1: try dtype" in told
    status, told = _command(name, "--model", str(path), ids, "1,2,3,4", "--tp", str(t), "--debug")
    assert status == 8 and "Traceback" in told and told.endswith("\n")
