"""Numbers of the host on a device, without waiting for it."""

from __future__ import annotations

from typing import Any

import torch


def on_device(values: Any, device: torch.device, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """
    A tensor of numbers on a device. `torch.tensor(…, device=…)` waits on CUDA until all work there has ended, which
    lets the device rest until the host has launched more; this does not: CUDA reads the host's memory at once.
    """
    tensor = torch.tensor(values, dtype=dtype, device="cpu")
    return tensor.to(device, non_blocking=device.type == "cuda")
