"""How long the collectives of a torch process group wait for a peer."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def timeout_of(process_group: dist.ProcessGroup, device: torch.device | str = "cpu") -> timedelta:
    """Of the backend that serves tensors on `device`."""
    timeout: timedelta = process_group._get_backend(torch.device(device)).options._timeout
    return timeout
