"""Copy bandwidth of a CUDA device: the limit of what only moves data through its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launch.measurement.spread import Spread

if TYPE_CHECKING:
    import torch

COPY_BYTES = 1 << 30
WARM_UPS = 3


def copy_bandwidth(device: torch.device, *, runs: int = 20, nbytes: int = COPY_BYTES) -> Spread:
    """Bytes read and written a second by a copy within the device's memory, between events on its stream.

    Args:
        device: a CUDA device.
        runs: copies that count.
        nbytes: of the source; far more than its caches hold.
    """
    import torch

    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rates = []
    with torch.cuda.device(device):
        for run in range(WARM_UPS + runs):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            if run >= WARM_UPS:
                rates.append(2 * nbytes / (start.elapsed_time(end) / 1e3))
    return Spread.of(rates)
