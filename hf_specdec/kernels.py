"""Where the Triton kernels of `hf_specdec_kernels` can run."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from importlib import metadata

import torch
from packaging import version


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that the kernels take."""
DEVICES = {"cuda": DTYPES}
"""Dtypes that the kernels take, by device type."""
OLDEST_TRITON = version.parse("3.4")
"""The first Triton with the waits of kernels that are launched early."""


@lru_cache(maxsize=1)
def kernels_are_installed() -> bool:
    """Whether `hf_specdec_kernels` is installed, and a Triton that compiles its kernels."""
    if any(importlib.util.find_spec(name) is None for name in ("triton", "hf_specdec_kernels")):
        return False
    try:
        return version.parse(metadata.version("triton")) >= OLDEST_TRITON
    except metadata.PackageNotFoundError:  # a build of another name
        return True
