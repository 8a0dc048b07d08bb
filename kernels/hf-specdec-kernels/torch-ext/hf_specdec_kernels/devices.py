"""What launches must know about a device. Triton's interpreter on a CPU stands for a small one without limits."""

from __future__ import annotations

import os
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


@lru_cache(maxsize=64)
def can_overlap(device: torch.device) -> bool:
    """
    Whether a kernel can be launched while the one before it still runs (programmatic dependent launch). Such a kernel
    waits before it touches memory, so that its results, and those of any kernel after it, are what they would be.
    """
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)


def options_of_launch(overlap: bool) -> dict[str, bool]:
    """Options with which Triton launches a kernel while the one before still runs, if `overlap`."""
    return {"launch_pdl": True} if overlap else {}


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, which has none of CUDA's functions."""
    return os.environ.get("TRITON_INTERPRET") == "1"
