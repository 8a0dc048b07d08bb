"""Capture of functions in CUDA graphs, and the memory pools that graphs share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from transformers.utils import logging

from ..building import building
from ..kernels import kernels_are_installed
from ..random_generators import generator_held
from . import exchanges
from .streams import own_stream


logger = logging.get_logger(__name__)

Record = Callable[..., tuple[Callable[[], None], list[torch.Tensor]]]
"""Type of functions such as `record_cuda_graph`."""


def record_cuda_graph(
    run: Callable[[], list[torch.Tensor]], device: torch.device, pool: GraphPool | None = None
) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """
    Captures `run` in a CUDA graph, after a warm-up run and, before that, one in which its kernels are only compiled;
    returns the function that replays the graph, and the tensors that `run` returned. Graphs that share a `pool` must
    never run at the same time, nor read what another one left in it.
    """
    with building():
        return _recorded(run, device, pool)


def _recorded(
    run: Callable[[], list[torch.Tensor]], device: torch.device, pool: GraphPool | None
) -> tuple[Callable[[], None], list[torch.Tensor]]:
    if not exchanges.are_captured():  # ranks could compile at different times
        compile_kernels(run, device, waits=True)
    stream = own_stream(device, "capture")
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream(device).wait_stream(stream)
    try:
        return _capture_on(stream, run, device, pool)
    except torch.cuda.OutOfMemoryError:
        pass  # the exception refers to memory of the failed capture, and must be freed first
    # When out of memory torch frees its cached blocks and tries again, but not while a graph is captured.
    gc.collect()
    torch.cuda.empty_cache()
    return _capture_on(stream, run, device, pool)


def compile_kernels(
    run: Callable[[], list[torch.Tensor]], device: torch.device, pool: GraphPool | None = None, waits: bool = False
) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """
    Begins to compile the kernels of a function that is to be captured later, beside each other. Called as
    `record_cuda_graph` is, which waits for them. Captures nothing.
    """
    if kernels_are_installed():
        from hf_specdec_kernels import compile_kernels_of

        stream = own_stream(device, "capture")
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with building(), torch.cuda.stream(stream):
                compile_kernels_of(run, device, waits)
        except Exception as error:  # whatever it is: the function meets it again
            logger.info(f"Kernels could not be compiled beside each other: {type(error).__name__}: {error}")
        torch.cuda.current_stream(device).wait_stream(stream)
    return (lambda: None), []


def end_compilation() -> None:
    """Waits for the kernels that this thread has begun to compile."""
    if kernels_are_installed():
        import hf_specdec_kernels

        hf_specdec_kernels.end_compilation()


def _capture_on(
    stream: torch.cuda.Stream, run: Callable[[], list[torch.Tensor]], device: torch.device, pool: GraphPool | None
) -> tuple[Callable[[], None], list[torch.Tensor]]:
    graph, handle = torch.cuda.CUDAGraph(), (pool or GraphPool()).handle()
    # The graph gets its own cuBLAS workspace: the stream's is freed when torch.compile captures its graphs.
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with generator_held(device), torch.cuda.stream(stream), _without_collection():
            torch.cuda.synchronize(device)
            graph.capture_begin(handle, "thread_local")
            try:
                tensors = run()
            except BaseException:
                with suppress(RuntimeError):  # the error of the failed capture: the first one says more
                    _end(graph, handle)
                raise
            _end(graph, handle)
    except BaseException:
        if pool is not None:
            pool.leave()
        raise
    finally:
        torch._C._cuda_clearCublasWorkspaces()

    exchanges.note(graph)

    def replay() -> None:
        with generator_held(device):
            graph.replay()

    return replay, tensors


def _end(graph: torch.cuda.CUDAGraph, handle: Any) -> None:
    """
    Ends a capture into the pool of this handle. If CUDA has given the capture up, as where the host waits for the
    device, torch raises and leaves the rest as during a capture: for as long as the process lives, its allocator frees
    no cached blocks when memory runs short; and until another capture ends, draws from the device's generator end with
    "Offset increment outside graph capture encountered unexpectedly".
    """
    try:
        graph.capture_end()
    except RuntimeError:
        # It has left the pool, if something later has failed; torch before 2.8 has other names for these.
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), handle)
            torch._C._cuda_releasePool(torch.cuda.current_device(), handle)
        with suppress(RuntimeError):  # the first error says more; out of memory, the next capture does the same
            _capture_something()
        raise


def _capture_something() -> None:
    """Captures a graph and drops it: the end of any capture lets torch's generator serve everyone again."""
    number, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    graph.capture_begin(None, "thread_local")
    number.add_(1)
    graph.capture_end()


@contextmanager
def _without_collection() -> Iterator[None]:
    """
    Disables garbage collection during a capture, when no memory may be freed. (`torch.cuda.graph` collects all garbage
    beforehand instead, and empties torch's cache: both take longer than the capture.)
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
    Memory pool of graphs that never run at the same time. After a failed capture, or when all its graphs may have been
    freed, no more graphs can be captured into a pool: later ones get another.
    """

    def __init__(self) -> None:
        self._handle: Any = None

    def handle(self) -> Any:
        """torch's handle of the memory pool."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def leave(self) -> None:
        """Leaves the present memory pool to graphs captured so far; later captures get a new one."""
        self._handle = None


RECORDERS: dict[str, Record] = {"cuda": record_cuda_graph}
"""Capturing function by type of device; on other devices nothing is captured."""
