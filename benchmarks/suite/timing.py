"""Timing of single forwards."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hf_specdec.benchmarking.comparison import synchronize


def captured(function: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """
    The replay of a function captured as a CUDA graph; without CUDA the function itself.

    The function must not wait for the device. A replay reads what the captured tensors hold at that time.
    """
    if device.type != "cuda":
        return function
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def milliseconds(function: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Milliseconds of each of `repeats` calls, device time included, after three calls for warm-up."""
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        times.append(1000 * (time.perf_counter() - start))
    return times
