"""The machine and software versions of a measurement."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers


def environment(device: str) -> dict[str, Any]:
    """The machine and the versions, as a dictionary for JSON."""
    found = {
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_specdec": _version(),
    }
    return found | ({"cuda": torch.version.cuda} if device.startswith("cuda") else {})


@cache
def cpu() -> str:
    """The CPU's name, and the instruction sets by which it multiplies."""
    sets = [torch.backends.cpu.get_cpu_capability()]
    has = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    sets += [name for name, key in (("AVX512-BF16", "avx512_bf16"), ("AMX", "amx_bf16")) if has.get(key)]
    return f"{_cpu_name()} ({', '.join(sets)})"


def _cpu_name() -> str:
    try:
        about = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        about = ""
    fields = (line.partition(":") for line in about.splitlines())
    names = (value.strip() for field, _, value in fields if field.strip() == "model name")
    return next(names, "") or platform.processor() or platform.machine()


def _version() -> str:
    from .. import __version__

    return __version__
