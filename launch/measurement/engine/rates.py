"""How fast all ranks together multiply matrices, and read a GPU's memory: the limits that shares are shares of."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from launch.measurement.copy_bandwidth import copy_bandwidth
from launch.measurement.engine.requests import MATRIX_PRODUCTS, RateRequest

if TYPE_CHECKING:
    import torch

    from tp.parallel.group import TensorParallelGroup

WIDTHS = {"cpu": 1024, "cuda": 8192}
"""Of the square matrices."""
TRIAL_WIDTH = 256
"""Of the products that decide the dtype: a CPU without instructions for bfloat16 may take a thousand times as long."""
COPIES = 3


class Rates:
    """Measures on this rank at the same time as the others do on theirs. Every rank makes one and calls `measure`.

    Args:
        dtype: what the model computes in. Products are made in it or in float32, which holds the same numbers,
            whichever is faster on rank 0.
    """

    def __init__(self, group: TensorParallelGroup, dtype: torch.dtype) -> None:
        self._group = group
        self._dtype = dtype
        self._operands: tuple[torch.Tensor, torch.Tensor] | None = None

    def measure(self, request: RateRequest) -> float:
        """Of all ranks together: FLOP/s, or bytes read and written a second by copies within the GPUs' memory."""
        if request.of == MATRIX_PRODUCTS:
            own = self._flops_per_s(request.seconds)
        else:
            self._start_together()
            own = copy_bandwidth(self._group.device, runs=COPIES).median
        rates: list[float] = self._group.communicator.all_gather_object(own)
        return sum(rates)

    def _flops_per_s(self, seconds: float) -> float:
        if self._operands is None:
            self._operands = self._make(WIDTHS[self._group.device.type], self._fastest())
        left, right = self._operands
        self._start_together()
        return _product_rate(left, right, seconds)

    def _fastest(self) -> torch.dtype:
        """On CUDA the model's own."""
        import torch

        candidates = list(dict.fromkeys([torch.float32, self._dtype]))
        if self._group.device.type == "cuda" or len(candidates) == 1:
            return self._dtype
        rates = {dtype: _product_rate(*self._make(TRIAL_WIDTH, dtype), 0.0) for dtype in candidates}
        chosen: torch.dtype = self._group.communicator.all_gather_object(max(rates, key=lambda dtype: rates[dtype]))[0]
        return chosen

    def _make(self, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        left, right = (torch.full((width, width), 0.5, dtype=dtype, device=self._group.device) for _ in range(2))
        _ = left @ right  # what a first product sets up does not count
        return left, right

    def _start_together(self) -> None:
        self._group.communicator.all_gather_object(None)


def _product_rate(left: torch.Tensor, right: torch.Tensor, seconds: float) -> float:
    """FLOP/s of products one after the other, at least one, for so long."""
    import torch

    began, products = time.perf_counter(), 0
    while True:
        _ = left @ right
        products += 1
        if left.is_cuda:
            torch.cuda.synchronize(left.device)
        if (passed := time.perf_counter() - began) >= seconds:
            return 2.0 * left.shape[0] * left.shape[1] * right.shape[1] * products / passed
