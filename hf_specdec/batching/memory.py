"""Memory that K/V and pending features take on each device, and memory that is free there."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..cache import sizes
from ..cache.pending_features import PendingFeatures
from ..checkpoints.pretrained import PublishedModel
from ..drafters.heads import dtype_in_use
from ..models.structure import execution_device


DEFAULT_SHARES = {"cpu": 0.25}
"""Default share of the free memory that K/V blocks take, by device type; 0.8 for types not listed."""
TOKEN_WITHOUT_KV = 4096
"""Bytes that count for a token of a target without attention: its blocks hold nothing, but are bounded in number."""


def bytes_per_token(models: Sequence[PreTrainedModel]) -> dict[torch.device, int]:
    """Bytes of K/V per token, on each device where layers of the models run. The first model is the target."""
    total: Counter[torch.device] = Counter()
    for model in models:
        total += sizes.bytes_per_token(model, dtype_in_use(model, models[0]))
    return dict(total)


def bytes_per_request(models: Sequence[PreTrainedModel], max_requests: int) -> dict[torch.device, int]:
    """
    Bytes of the recurrent and convolutional states of each of `max_requests` requests, of what steps leave pending of
    them, of pending features on each device with a head that reads them (see `PendingFeatures`), and of its outputs.
    """
    total: Counter[torch.device] = Counter()
    for model in models:
        total += sizes.bytes_of_steps(model, dtype_in_use(model, models[0]))
        total += sizes.bytes_of_states(model, dtype_in_use(model, models[0]))
        if isinstance(model, PublishedModel):
            size = model.config.feature_size * dtype_in_use(model, models[0]).itemsize
            total[execution_device(model)] += PendingFeatures.capacity_for(max_requests, size) * size
    return dict(total + bytes_between_steps(models))


def bytes_between_steps(models: Sequence[PreTrainedModel]) -> Counter[torch.device]:
    """
    Bytes of the outputs that heads read with the next token (`size_between_steps`), for one text: each running request
    has them, and where texts share blocks each block for its end.
    """
    total: Counter[torch.device] = Counter()
    for model in models:
        if isinstance(model, PublishedModel):
            size = model.config.size_between_steps * dtype_in_use(model, models[0]).itemsize
            total[execution_device(model)] += size
    return total


def bytes_of_scans(models: Sequence[PreTrainedModel], rows: int, tokens: int, nodes: int) -> dict[torch.device, int]:
    """
    Bytes that recurrences take while they run, on each device: those of the model that takes most, since one runs at a
    time. See `sizes.bytes_of_scans`.
    """
    most: Counter[torch.device] = Counter()
    for model in models:
        most |= sizes.bytes_of_scans(model, dtype_in_use(model, models[0]), rows, tokens, nodes)
    return dict(most)


def free_memory(device: torch.device) -> int:
    """
    Bytes that are free on a device, on a CPU those of `available_host_memory`. On a GPU, memory cached by torch and of
    dropped managers is freed first.
    """
    if device.type == "cuda":
        gc.collect()  # whatever was dropped and is part of a reference cycle
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return available_host_memory()


def available_host_memory(root: Path = Path("/")) -> int:
    """
    Bytes of main memory that this process can take: `MemAvailable` of /proc/meminfo, which counts cached files that
    Linux gives up when memory is needed, but at most what the process's cgroups (version 2) have left. Without such a
    figure, the pages that are free; 4 GiB where these are not known either. `root` is the directory with `proc` and
    `sys`.
    """
    limits = [*_host_memory(root), *_left_in_cgroups(root)]
    if limits:
        return min(limits)
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 4 << 30


def _host_memory(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        name, *values = line.split()
        if name == "MemAvailable:" and values and values[0].isdecimal():
            yield int(values[0]) << 10


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """
    Bytes left in the process's cgroup and in those that contain it, as far as they have limits. Cached files that are
    not in use count as left, as in the working set of Kubernetes.
    """
    own = next((line[3:] for line in _lines(root / "proc/self/cgroup") if line.startswith("0::")), None)
    if own is None:
        return
    top = root / "sys/fs/cgroup"
    group = top / own.lstrip("/")
    for place in (group, *group.parents[: len(group.relative_to(top).parts)]):
        limit, used = (next(iter(_lines(place / f"memory.{name}")), "") for name in ("max", "current"))
        if limit.isdecimal() and used.isdecimal():
            cached = [line.split()[-1] for line in _lines(place / "memory.stat") if line.startswith("inactive_file ")]
            yield max(int(limit) - int(used) + sum(int(number) for number in cached if number.isdecimal()), 0)


def _lines(path: Path) -> list[str]:
    """The lines of a file; none if it cannot be read."""
    try:
        return [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []
