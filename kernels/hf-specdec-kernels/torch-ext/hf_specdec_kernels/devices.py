"""What launches must know about a device. Triton's interpreter on a CPU stands for a small one without limits."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=64)
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@lru_cache(maxsize=64)
def shared_memory_limit(device: torch.device) -> int:
    """Bytes of shared memory that a program can have; a large number if the device does not report it."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return getattr(properties, "shared_memory_per_block_optin", 2**30)
