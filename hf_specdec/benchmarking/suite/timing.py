"""Timing of single forwards."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..comparison import synchronize


def captured(function: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """
    The function as a CUDA graph, on what its tensors hold by then; elsewhere the function itself. It must not wait for
    the device.
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
    """What each of `repeats` calls took, the device's part included, after a few that warm up."""
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
