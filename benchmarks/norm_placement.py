"""What the placement of the norms does: "On Layer Normalization in the Transformer Architecture" measured again.

    python -m launch run --nproc 1 -m benchmarks.norm_placement
    python -m launch run --nproc 1 -m benchmarks.norm_placement --parts checkpoints --models DIRECTORY,DIRECTORY
    python -m launch run --nproc 2 -m benchmarks.norm_placement --seeds 2
    python -m benchmarks.norm_placement --plot

Parts: norms and gradients before the first step (Xiong et al. 2020, arXiv:2002.04745, lemma 2 and theorem 1), a small
model trained with and without warm-up, and the stream of trained checkpoints. Each run adds its numbers to --json under
its degree; training runs that are there already are not done again. --plot summarises and draws what is there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from tp.parallel import TensorParallelGroup

RESULTS = Path(__file__).parent / "results" / "norm-placement.json"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
NUM_SEEDS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="initialisation,training", help="which to run, separated by commas")
    parser.add_argument("--models", default="", help="directories of the checkpoints, separated by commas")
    parser.add_argument("--seeds", type=int, help="only so many (default: 24; of training runs 5, or 3)")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the numbers are kept")
    parser.add_argument("--plot", action="store_true", help="run nothing; summarise the numbers and draw the figures")
    arguments = parser.parse_args()
    if arguments.plot:
        plot(arguments.json)
    else:
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    group = TensorParallelGroup.from_environment(device="cpu")
    store = Store(arguments.json, group)
    for part in arguments.parts.split(","):
        {"initialisation": _initialisation, "training": _training, "checkpoints": _checkpoints}[part](
            arguments, store, group
        )
    group.close()


def plot(path: Path) -> None:
    from benchmarks.norm_placement_parts.figures import draw
    from benchmarks.norm_placement_parts.summary import largest_differences, summarise

    content = json.loads(path.read_text())
    degrees = content["tp_size"]
    content["summary"] = summarise(degrees["1"])
    content["largest_relative_differences_to_one_rank"] = {
        size: largest_differences(degrees["1"], measured) for size, measured in degrees.items() if size != "1"
    }
    path.write_text(json.dumps(content))
    for name, value in content["summary"].items():
        print(f"{name}: {value}")
    print(content["largest_relative_differences_to_one_rank"])
    draw(degrees["1"], IMAGES)


class Store:
    """The file with all numbers, as rank 0 finds and writes it."""

    def __init__(self, path: Path, group: TensorParallelGroup) -> None:
        self._path, self._group = path, group

    def of_part(self, part: str) -> dict[str, Any]:
        """What this degree has of a part; the same on every rank."""
        own = self._read()["tp_size"].get(str(self._group.size), {}) if self._group.rank == 0 else {}
        found: dict[str, Any] = self._group.communicator.all_gather_object(own.get(part, {}))[0]
        return found

    def add(self, part: str, values: dict[str, Any]) -> None:
        """Adds entries to a part, or replaces them."""
        if self._group.rank == 0:
            content = self._read()
            content["tp_size"].setdefault(str(self._group.size), {}).setdefault(part, {}).update(values)
            self._path.write_text(json.dumps(content))

    def _read(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {"tp_size": {}}
        return content


def _initialisation(arguments: argparse.Namespace, store: Store, group: TensorParallelGroup) -> None:
    from benchmarks.norm_placement_parts import at_initialisation

    store.add("initialisation", at_initialisation.measure(group, arguments.seeds or NUM_SEEDS))


def _training(arguments: argparse.Namespace, store: Store, group: TensorParallelGroup) -> None:
    from benchmarks.norm_placement_parts import training

    data = training.datasets()
    done = store.of_part("training")
    for trial in training.trials(arguments.seeds):
        if trial.name in done:
            continue
        result = training.run(trial, data, group)
        store.add("training", {trial.name: result})
        if group.rank == 0:
            print(f"{trial.name}: held-out loss {result['held_out']:.3f}", flush=True)


def _checkpoints(arguments: argparse.Namespace, store: Store, group: TensorParallelGroup) -> None:
    from benchmarks.norm_placement_parts import checkpoints

    for directory in map(Path, filter(None, arguments.models.split(","))):
        store.add("checkpoints", {directory.name: checkpoints.measure(directory, group)})


if __name__ == "__main__":
    main()
