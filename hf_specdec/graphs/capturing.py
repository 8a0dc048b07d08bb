"""Capturing what runs on a device as a graph, and the memory that graphs share."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


Record = Callable[..., tuple[Callable[[], None], list[torch.Tensor]]]
"""As `record_cuda_graph`."""


_capturing = threading.Lock()
"""Two threads at a time would both capture the draws of the device's one random generator."""


def record_cuda_graph(
    run: Callable[[], list[torch.Tensor]], device: torch.device, pool: GraphPool | None = None
) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """
    Captures `run` after a first run for what is done once; returns what replays it, and its tensors. Graphs that share
    a `pool` must never run at the same time, nor read what another left there.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream(device).wait_stream(stream)
    try:
        return _capture_on(stream, run, device, pool)
    except torch.cuda.OutOfMemoryError:
        pass  # what the failed capture has made is known to the exception: it must be gone first
    # Elsewhere torch would have given back what it holds for later; while a graph is captured it cannot.
    gc.collect()
    torch.cuda.empty_cache()
    return _capture_on(stream, run, device, pool)


def _capture_on(
    stream: torch.cuda.Stream, run: Callable[[], list[torch.Tensor]], device: torch.device, pool: GraphPool | None
) -> tuple[Callable[[], None], list[torch.Tensor]]:
    graph = torch.cuda.CUDAGraph()
    # The graph gets a cuBLAS workspace of its own: that of the stream goes when torch.compile captures its graphs.
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with _capturing, torch.cuda.stream(stream), _without_collection():
            torch.cuda.synchronize(device)
            graph.capture_begin(None if pool is None else pool.handle(), "thread_local")
            try:
                tensors = run()
            except BaseException:
                with suppress(RuntimeError):  # that the capture has failed: why says more
                    graph.capture_end()
                raise
            graph.capture_end()
    except BaseException:
        if pool is not None:
            pool.leave()
        raise
    finally:
        torch._C._cuda_clearCublasWorkspaces()
    return graph.replay, tensors


@contextmanager
def _without_collection() -> Iterator[None]:
    """
    What garbage holds may not be freed while a graph is captured. (`torch.cuda.graph` collects it all before instead,
    and empties torch's cache: both take longer than the capture.)
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphPool:
    """
    Memory for graphs that take turns. Where a capture has failed, or all graphs may be gone, nothing more can be
    captured into the same: those to come get another.
    """

    def __init__(self) -> None:
        self._handle: Any = None

    def handle(self) -> Any:
        """What torch knows the memory by."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def leave(self) -> None:
        """Lets it to those that are captured already."""
        self._handle = None


RECORDERS: dict[str, Record] = {"cuda": record_cuda_graph}
"""By type of device, how a forward is captured; elsewhere none is."""
