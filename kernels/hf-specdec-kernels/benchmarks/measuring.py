"""
Timing on a GPU: calls are captured in one CUDA graph, each with its own copy of the inputs, so that no call finds its
inputs in the L2 cache. Importing this module puts the package in `torch-ext/` on the path, installed or not.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


sys.path.insert(0, str(Path(__file__).parent.parent / "torch-ext"))

CACHE_TO_FLUSH = 256 * 2**20
"""Bytes of other inputs that are read before a call's inputs come again: several times any GPU's L2 cache."""


@dataclass(frozen=True)
class Time:
    """Milliseconds of one call: the median, and the 20th and 80th percentile over graph replays."""

    median: float
    p20: float
    p80: float

    def __str__(self) -> str:
        return f"{self.median:.4f} ms ({self.p20:.4f}–{self.p80:.4f})"


def copies_needed(num_bytes: int) -> int:
    """Number of copies of inputs of `num_bytes` that calls should take in turn."""
    return max(2, -(-CACHE_TO_FLUSH // max(num_bytes, 1)) + 1)


def time_calls(calls: Sequence[Callable[[], Any]], replays: int = 40) -> Time:
    """The time of one of `calls`, which do equal work on different inputs and are captured into one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles; fills the allocator
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = torch.tensor([start.elapsed_time(end) for start, end in zip(events[:-1], events[1:], strict=True)])
    times = times.double() / len(calls)
    p20, median, p80 = times.quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    return Time(median, p20, p80)


def copy_bandwidth(num_bytes: int = 2**30) -> float:
    """Bytes per second of a large copy, counting both bytes read and bytes written."""
    source = torch.randint(0, 127, (num_bytes // 4,), dtype=torch.int32, device="cuda")  # int8 is copied slower
    target = torch.empty_like(source)
    return 2 * num_bytes / (time_calls([lambda: target.copy_(source)] * 2).median * 1e-3)


def environment() -> dict[str, str]:
    """Names of the device and software versions."""
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def require_cuda() -> None:
    """Exits the script if there is no CUDA device."""
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device.")


def attempt(name: str, measure: Callable[[], Time]) -> Time | None:
    """The time of `measure`; None, with the error printed, if it cannot run on this machine."""
    try:
        return measure()
    except Exception as error:  # a peer that fails must not end the benchmark
        print(
            f"  {name} did not run: {type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
        )
        torch.cuda.synchronize()
        return None
