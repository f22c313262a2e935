"""On every rank: collectives without end, as in a long training; each leaves a file when the first one is done.

python -m launch run --nproc 2 -m benchmarks.multi_node_parts.endless DIRECTORY
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from tp.parallel import TensorParallelGroup

PAUSE_S = 0.02


def main() -> None:
    group = TensorParallelGroup.from_environment("gloo", "cpu")
    value = torch.ones(256)
    group.communicator.all_reduce(value)
    Path(sys.argv[1], f"rank-{group.rank}").touch()
    while True:
        group.communicator.all_reduce(value)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
