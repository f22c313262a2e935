"""On every rank: the seconds of single collectives, and which communicator had them. Rank 0 writes them to a file.

python -m launch run --nproc 2 -m benchmarks.multi_node_parts.time_collectives FILE REPEATS
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import torch

from benchmarks.collectives import call_seconds, operation
from benchmarks.multi_node_parts.collective_cases import CASES
from tp.parallel import TensorParallelGroup

WARM_UPS = 3


def main() -> None:
    target, repeats = Path(sys.argv[1]), int(sys.argv[2])
    group = TensorParallelGroup.from_environment("gloo", "cpu")
    seconds = {}
    for case in CASES:
        call = operation(group.communicator, case.operation, case.nbytes, torch.float32)
        seconds[case.name] = call_seconds(call, WARM_UPS + repeats)[WARM_UPS:]
    hosts = group.communicator.all_gather_object(socket.gethostname())
    if group.rank == 0:
        about = {"communicator": type(group.communicator).__name__, "hosts": hosts}
        target.write_text(json.dumps({**about, "seconds": seconds}))
    group.close()


if __name__ == "__main__":
    main()
