"""What a rank measures for `bench`: its collectives by their clock, its products, its regions in a trace."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from tiny_models import hub_config

from launch.benching.rows import Measured, Sample, rows_of
from launch.benching.sweep import Case, Form
from launch.benching.table import tables
from launch.measurement.engine import ranks as ranks_module
from launch.measurement.engine.communication import Reading, of_all_ranks
from launch.measurement.engine.model import load_model
from launch.measurement.engine.rates import Rates
from launch.measurement.engine.regions import collective_region, named_regions
from launch.measurement.engine.requests import MATRIX_PRODUCTS, RateRequest, TraceRequest, TrainingRequest
from launch.measurement.engine.serving import decode, switched_off
from launch.measurement.engine.trace import trace_serving, trace_training
from launch.measurement.engine.training import make_training, random_batch, train
from launch.measurement.model_facts import text_of_config
from launch.measurement.requests import random_request
from tp.choice import enabled
from tp.config import ModelConfig
from tp.layers.residual_stream import ResidualStream
from tp.parallel import TensorParallelGroup
from tp.parallel.communicator import Communicator
from tp.parallel.timeouts import timeout_of

COLLECTIVE_S = 0.005
COMPUTE_S = 0.04
"""Of a step, by the clock of the tests."""


class Clock:
    """Seconds that pass only where somebody says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


class SlowCommunicator(Communicator):
    """Rank 0 of two, whose peer adds nothing; a collective takes 5 ms."""

    def __init__(self, clock):
        super().__init__(0, 2)
        self.clock = clock
        self.entered = Counter()

    def _done(self, name, result):
        self.clock.advance(COLLECTIVE_S)
        self.entered[name] += 1
        return result

    def _all_reduce(self, tensor):
        return self._done("all_reduce", tensor.clone())

    def _all_gather(self, tensor, sizes):
        padding = tensor.new_zeros((sum(sizes) - len(tensor), *tensor.shape[1:]))
        return self._done("all_gather", torch.cat([tensor, padding]))

    def _reduce_scatter(self, tensor, sizes):
        return self._done("reduce_scatter", tensor[: sizes[0]].clone())

    def _broadcast(self, tensor, source):
        return self._done("broadcast", tensor.clone())

    def all_gather_object(self, value):
        return [value, value]


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("tp.parallel.communicator.time", SimpleNamespace(perf_counter=made))
    return made


@pytest.fixture(scope="module")
def model_text():
    """Of weights large enough for other weights to give other tokens."""
    return text_of_config(ModelConfig.from_hf(hub_config("llama", initializer_range=0.2)))


@pytest.mark.parametrize("layout", ["off", "on"])
def test_time_in_collectives_is_that_of_their_own_clock(clock, model_text, layout):
    """N collectives of 5 ms: 5 N ms are reported, of prefill and decode apart, and a speed-up below 1 is called so."""
    group = TensorParallelGroup(SlowCommunicator(clock))
    model = load_model(model_text, "float32", group)
    model.lm_head.register_forward_hook(lambda *_: clock.advance(COMPUTE_S))
    model.model.embed_tokens.register_forward_hook(lambda *_: group.communicator.entered.update(["step"]))
    entered = group.communicator.entered
    request = random_request(2, 7, 5, model.config.vocab_size)
    answer = decode(model, replace(request, layout=layout), now=clock)
    collectives = entered.total() - entered["step"]
    prefill, later = answer.prefill_communication, answer.decode_communication
    assert entered["step"] == 5 and prefill.calls + later.calls == collectives
    for part, steps in ((prefill, 1), (later, 4)):
        assert part.calls >= steps * (2 * model.config.num_layers + 1)
        assert part.seconds == pytest.approx((part.calls * COLLECTIVE_S,) * 2, rel=0.1)
    assert later.calls % 4 == 0
    assert answer.tpot_ms == pytest.approx(1e3 * (COMPUTE_S + later.calls / 4 * COLLECTIVE_S), rel=1e-6)
    assert answer.ttft_ms == pytest.approx(1e3 * (COMPUTE_S + prefill.calls * COLLECTIVE_S), rel=1e-6)

    case = Case("strong", "decode", "float32", 2, 7, 5)
    alone, ranks = Form("own", 1, 2, 2), Form("own", 2, 1, 2, "replicate")
    samples = {alone: [Sample(0.5 * answer.tpot_ms, None)], ranks: [Sample.of(case, answer)]}
    rows = rows_of(case, Measured(samples, "memory", {}), dict.fromkeys(samples, 1.0), model.config.num_layers)
    assert rows[1].collectives.milliseconds.median == pytest.approx(later.calls / 4 * 5.0, rel=0.1)
    assert rows[1].collectives.calls_a_layer == later.calls / 4 / model.config.num_layers
    assert tables(rows)[0].rows[1][3] == "0.50x (0.50 to 0.50): slower than t = 1"


def test_a_training_step_has_its_collectives_of_forward_and_backward(clock, model_text):
    group = TensorParallelGroup(SlowCommunicator(clock))
    learner = make_training(model_text, "float32", group)
    learner.optimizer.register_step_post_hook(lambda *_: clock.advance(COMPUTE_S))
    answer = train(learner, TrainingRequest(2, 6, "on"), now=clock)
    calls = group.communicator.entered.total()
    assert calls == answer.communication.calls > 4 * learner.model.config.num_layers
    assert answer.communication.seconds == pytest.approx((calls * COLLECTIVE_S,) * 2, rel=0.1)
    assert answer.milliseconds == pytest.approx(1e3 * (COMPUTE_S + calls * COLLECTIVE_S), rel=1e-6)


def test_a_rank_that_is_alone_has_no_collectives(model_text):
    group = TensorParallelGroup.alone()
    model = load_model(model_text, "float32", group)
    answer = decode(model, random_request(1, 4, 3, model.config.vocab_size))
    assert answer.prefill_communication is answer.decode_communication is None
    assert [len(ids) for ids in answer.new_ids] == [3] and answer.tpot_ms > 0


def _same_work(group, model_text):
    """New ids in both layouts, two training losses before and after a step, and what the communicator counted."""
    model = load_model(model_text, "float32", group)
    request = random_request(3, 9, 4, model.config.vocab_size)
    answers = [decode(model, replace(request, layout=layout)) for layout in ("off", "on")]
    learner = make_training(model_text, "float32", group)
    trained = [train(learner, TrainingRequest(2, 9, layout)) for layout in ("off", "on")]
    reading = Reading.of(group.communicator)
    counted = of_all_ranks(reading, group.communicator)
    rate = Rates(group, torch.bfloat16).measure(RateRequest(MATRIX_PRODUCTS, 0.0))
    return [answer.new_ids for answer in answers], [each.loss for each in trained], counted, rate


def test_every_degree_does_the_same_work(ranks, model_text):
    ((ids, losses, nothing, _),) = ranks(1).run(_same_work, model_text)
    assert nothing is None and ids[0] == ids[1]
    assert losses[0] == losses[1] == pytest.approx(losses[0])  # a step leaves the weights as they are
    outcomes = ranks(2).run(_same_work, model_text)
    for new_ids, same_losses, counted, rate in outcomes:
        assert new_ids == ids
        assert same_losses == pytest.approx(losses, rel=1e-5)
        assert len(counted.seconds) == 2 and min(counted.seconds) > 0 and counted.calls > 0
        assert rate == outcomes[0][3] > 1e6


def test_tokens_to_train_on_are_rows_of_equal_length():
    batch = random_batch(TrainingRequest(3, 5), vocab_size=50)
    assert batch.sequence_lengths == (5, 5, 5) and batch.num_labels == 15
    assert torch.equal(batch.token_ids[1:], batch.labels[:-1]) and int(batch.token_ids.max()) < 50


def _traced(group, model_text, directory):
    model = load_model(model_text, "float32", group)
    request = random_request(2, 6, 4, model.config.vocab_size)
    before = _hooks(model)
    trace_serving(model, TraceRequest(request, directory, f"decode-{group.size}"))
    one = replace(request, new_tokens=1, layout="on")
    trace_serving(model, TraceRequest(one, directory, f"prefill-{group.size}"))
    assert _hooks(model) == before == 0
    assert ResidualStream.read.__name__ == "read" and "run_collective" not in vars(group.communicator)
    learner = make_training(model_text, "float32", group)
    before = _hooks(learner.model)
    path = trace_training(learner, TraceRequest(TrainingRequest(1, 8, "on"), directory, f"train-{group.size}"))
    assert _hooks(learner.model) == before
    return path


def _hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def _regions(path):
    events = json.loads(path.read_text())["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


def test_traces_have_named_regions_and_nothing_of_them_stays(ranks, model_text, tmp_path):
    assert ranks(2).run(_traced, model_text, str(tmp_path)) == [
        str(tmp_path / f"train-2-rank-{rank}.json") for rank in range(2)
    ]
    layers, steps = 2, 3
    for rank in range(2):
        decoded = _regions(tmp_path / f"decode-2-rank-{rank}.json")
        expected = dict.fromkeys(["qkv", "attention", "o_proj", "gate_up", "activation", "down"], layers * steps)
        assert {name: decoded[name] for name in expected} == expected
        assert decoded["norm"] == (2 * layers + 1) * steps
        assert decoded["embed"] == decoded["lm_head"] == steps
        reduces = sum(count for name, count in decoded.items() if name.startswith("reduce: "))
        assert reduces == (2 * layers + 1) * steps
        prefill = _regions(tmp_path / f"prefill-2-rank-{rank}.json")
        assert prefill["qkv"] == layers and prefill["gather: all_gather"] >= 2 * layers
        trained = _regions(tmp_path / f"train-2-rank-{rank}.json")
        assert trained["lm_head and loss"] == 1 and trained["o_proj"] == trained["down"] == layers
        assert trained["reduce: reduce_scatter"] >= 4 * layers


def test_collectives_are_named_by_what_they_do():
    names = ("_all_reduce", "_reduce_add_rms_norm", "_all_gather_matmul", "_broadcast")
    assert [collective_region(name) for name in names] == [
        "reduce: all_reduce", "reduce: reduce_add_rms_norm", "gather: all_gather_matmul", "broadcast",
    ]  # fmt: skip


def test_regions_end_when_what_they_name_raises(model_text):
    model = load_model(model_text, "float32", TensorParallelGroup.alone())
    read, write = ResidualStream.read, ResidualStream.write

    def raises():
        with named_regions(model):
            assert ResidualStream.read is not read
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        raises()
    assert (ResidualStream.read, ResidualStream.write) == (read, write) and _hooks(model) == 0


def test_what_was_switched_off_before_stays_so(monkeypatch):
    from tp.choice import DISABLE_VARIABLE, disable

    monkeypatch.setenv(DISABLE_VARIABLE, "rms_norm")
    disable("rms_norm")
    try:
        with switched_off("decode_graphs"):
            assert not enabled("decode_graphs") and not enabled("rms_norm")
        assert enabled("decode_graphs") and not enabled("rms_norm")
    finally:
        disable("")


def _request_of_ranks_on_gpus(group):
    """What is shared, the backend, and how long a rank waits for it."""
    on_gpus = SimpleNamespace(size=group.size, device=torch.device("cuda", 0))
    waiting = ranks_module._on_the_cpu(on_gpus)
    shared = ranks_module._shared(waiting, "a request" if group.rank == 0 else None)
    return shared, torch.distributed.get_backend(waiting.process_group), timeout_of(waiting.process_group)


def test_ranks_on_gpus_wait_for_requests_over_gloo(ranks):
    expected = "a request", "gloo", timedelta(seconds=ranks_module.PATIENCE_S)
    assert ranks(4).run(_request_of_ranks_on_gpus) == [expected] * 4


def test_ranks_on_cpus_wait_in_their_own_group():
    group = TensorParallelGroup.alone()
    assert ranks_module._on_the_cpu(group) is group
