"""Whether two nodes compute what one does: greedy tokens, and the loss and gradient norm of training steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.multi_node_parts.launching import NODES, RANKS_A_NODE, ROOT, Outcome, run, run_alone
from benchmarks.multi_node_parts.networks import Network

PROMPT_IDS = "5,6,7,8,9,10,11,12"
NEW_TOKENS = 32
STEPS = 3
TWO_NODES, ONE_MACHINE, ONE_RANK = "two nodes", "one machine", "one rank"
DEGREE = NODES * RANKS_A_NODE
TOLERANCE = 1e-9
"""Relative, of losses and gradient norms in float64."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 48,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
"""Of the model that is trained; four ranks share its two KV heads."""

Runner = Callable[[list[str]], Sequence[Outcome]]
"""Runs a command of our launcher somewhere."""


@dataclass(frozen=True)
class Agreement:
    """What two nodes gave, beside one machine at the same degree and at t = 1.

    Attributes:
        new_ids: greedy, float32.
        same_ids: that they are those of one machine, at either degree.
        steps: loss and gradient norm of each training step in float64, by where they ran.
        largest_difference: relative, of two nodes against t = 1.
        bitwise: that two nodes and one machine at the same degree gave the same bits.
    """

    new_ids: list[int]
    same_ids: bool
    steps: dict[str, list[tuple[float, float]]]
    largest_difference: float
    bitwise: bool

    @property
    def holds(self) -> bool:
        return self.same_ids and self.largest_difference <= TOLERANCE


def agreement(network: Network, model: str, directory: Path) -> Agreement:
    """Runs a generation and a training on the two nodes, and on one machine with four ranks and with one."""
    places: dict[str, tuple[int, Runner]] = {
        TWO_NODES: (DEGREE, lambda arguments: run(network, arguments, directory)),
        ONE_MACHINE: (DEGREE, lambda arguments: [run_alone(arguments, directory)]),
        ONE_RANK: (1, lambda arguments: [run_alone(arguments, directory)]),
    }
    ids, steps = {}, {}
    for place, (degree, runner) in places.items():
        ids[place] = _ids(runner(["generate", *generate_options(model, degree)]))
        steps[place] = _trained(runner, degree, directory / place.replace(" ", "-"))
    return Agreement(
        new_ids=ids[TWO_NODES],
        same_ids=ids[TWO_NODES] == ids[ONE_MACHINE] == ids[ONE_RANK],
        steps=steps,
        largest_difference=largest_difference(steps[TWO_NODES], steps[ONE_RANK]),
        bitwise=steps[TWO_NODES] == steps[ONE_MACHINE],
    )


def generate_options(model: str, degree: int = DEGREE) -> list[str]:
    """Of the command `generate`: greedy in float32, its report on stdout."""
    numbers = ["--tp", str(degree), "--dtype", "float32", "--device", "cpu", "--json"]
    request = ["--prompt-ids", PROMPT_IDS, "--max-new-tokens", str(NEW_TOKENS), "--ignore-eos"]
    return ["--model", model, *numbers, *request]


def largest_difference(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> float:
    """The largest relative difference of values in equal places, by the size of `other`'s.

    Raises:
        ValueError: unequal numbers of steps.
    """
    pairs = [pair for steps in zip(one, other, strict=True) for pair in zip(*steps, strict=True)]
    return max(abs(value - reference) / abs(reference) for value, reference in pairs)


def report_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What `generate` printed, on the one node that has rank 0."""
    (printed,) = filter(None, (outcome.out for outcome in outcomes))
    report: dict[str, Any] = json.loads(printed)
    return report


def _ids(outcomes: Sequence[Outcome]) -> list[int]:
    return list(report_of(outcomes)["sequences"][0]["new_ids"])


def _trained(runner: Runner, degree: int, output: Path) -> list[tuple[float, float]]:
    output.mkdir()
    config, text = output / "config.json", output / "text.md"
    config.write_text(json.dumps(CONFIG))
    text.write_text((ROOT / "docs" / "numerics.md").read_text(encoding="utf-8"), encoding="utf-8")
    batches = ["--sequence-length", "32", "--batch-size", "2", "--steps", str(STEPS), "--warmup-steps", "0"]
    model = ["--config", str(config), "--train-tokenizer", str(CONFIG["vocab_size"]), "--data", str(text)]
    numbers = ["--tp", str(degree), "--dtype", "float64", "--device", "cpu"]
    runner(["train", *model, *batches, *numbers, "--output", str(output / "run")])
    lines = map(json.loads, (output / "run" / "metrics.jsonl").read_text().splitlines())
    return [(line["loss"], line["grad_norm"]) for line in lines if line["kind"] == "step"]
