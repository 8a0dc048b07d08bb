"""The machine and software versions of a measurement."""

from __future__ import annotations

import platform
from typing import Any

import torch
import transformers


def environment(device: str) -> dict[str, Any]:
    """The machine and the versions, as a dictionary for JSON."""
    found = {
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_specdec": _version(),
    }
    return found | ({"cuda": torch.version.cuda} if device.startswith("cuda") else {})


def _version() -> str:
    from .. import __version__

    return __version__
