"""Where the Triton kernels of `hf_specdec_kernels` can run."""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import torch


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that the kernels take."""
DEVICES = {"cuda": DTYPES}
"""Dtypes that the kernels take, by device type."""


@lru_cache(maxsize=1)
def kernels_are_installed() -> bool:
    """Whether `hf_specdec_kernels` and Triton are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("triton", "hf_specdec_kernels"))
