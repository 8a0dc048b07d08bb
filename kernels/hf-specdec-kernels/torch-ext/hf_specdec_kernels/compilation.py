"""
Kernels compiled beside each other: where functions are about to launch many that have not been compiled, each would
else wait for the one before.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from .devices import is_interpreted


MOST_THREADS = 16
"""Most threads that compile. They hold Python's lock for some hundredths of the time."""


class _OfThread(threading.local):
    """What is so in one thread."""

    rests = False
    """Whether its operators rest."""
    launch: Callable[..., Any] | None = None
    """Takes its launches, if anything is to."""
    compilation: _Compilation | None = None
    """What compiles kernels for it at present."""


_thread = _OfThread()


def compile_kernels_of(run: Callable[[], Any], device: torch.device, waits: bool = True) -> bool:
    """
    Compiles the kernels that a function launches in threads, beside each other. Calls the function, during which
    operators only compile: none of their kernels runs, their results are zeros, and what they change in place stays
    as it is. What else the function does is done. It must not choose by these results what it launches, nor keep them.

    Args:
        run (`Callable`): the function.
        device (`torch.device`): the CUDA device.
        waits (`bool`, *optional*, defaults to True): whether to wait for these kernels, and those of earlier calls by
            this thread that did not.

    Returns:
        `bool`: whether it did: not on a single processor core, nor with a Triton that cannot.

    Raises:
        Exception: what the function raises. What a compilation raises, the kernel's launch raises again.
    """
    if _thread.compilation is not None and _thread.compilation.device != device:
        end_compilation()
    compilation = _thread.compilation or _Compilation.begun(device)
    if compilation is None:
        return False
    _thread.compilation = compilation
    try:
        with operators_rest(compilation.compile):
            run()
    finally:
        if waits:
            end_compilation()
    return True


def end_compilation() -> None:
    """Waits for the kernels of earlier calls of `compile_kernels_of` by this thread that did not wait."""
    compilation, _thread.compilation = _thread.compilation, None
    if compilation is not None:
        compilation.end()


@contextmanager
def operators_rest(launch: Callable[..., Any] | None = None) -> Iterator[None]:
    """
    A context in which operators of this thread do not run: their results are zeros.

    Args:
        launch (`Callable`, *optional*): takes a kernel, the grid and the arguments of each launch.
    """
    before = _thread.rests, _thread.launch
    _thread.rests, _thread.launch = True, launch
    try:
        yield
    finally:
        _thread.rests, _thread.launch = before


def operators_are_resting() -> bool:
    """Whether operators of this thread do not run."""
    return _thread.rests


def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """`kernel[grid]`; while operators rest, what takes the launch instead."""
    return kernel[grid] if _thread.launch is None else partial(_thread.launch, kernel, grid)


class _Compilation:
    """
    Kernels that are compiled beside each other.

    Args:
        mode (`type`): Triton's `AsyncCompileMode`.
        threads (`int`): number of threads.
        device (`torch.device`): the device that kernels are compiled for.
    """

    def __init__(self, mode: Any, threads: int, device: torch.device):
        self.device = device
        self._threads, self._context = _Threads(threads, device), contextvars.copy_context()
        # Errors of one kernel would keep others from being entered; each kernel's launch meets its own again.
        self._mode = mode(self._threads, ignore_errors=True)
        self._context.run(self._mode.__enter__)

    @classmethod
    def begun(cls, device: torch.device) -> _Compilation | None:
        """A new one; None where kernels cannot be compiled beside each other."""
        threads = min(_num_cores(), MOST_THREADS)
        if threads < 2 or is_interpreted():
            return None
        try:
            from triton import AsyncCompileMode
        except ImportError:  # before 3.5
            return None
        return cls(AsyncCompileMode, threads, device)

    def compile(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Begins to compile a kernel for a launch, unless it is compiled already."""
        self._context.run(kernel.run, *args, grid=grid, warmup=True, **options)

    def end(self) -> None:
        """Waits for all kernels."""
        try:
            self._context.run(self._mode.__exit__, None, None, None)
        finally:
            self._threads.end()


class _Threads:
    """
    What Triton takes for an executor: threads that compile kernels and load them, too, for which Triton builds code in
    C that launches them.
    """

    def __init__(self, number: int, device: torch.device):
        self._executor = ThreadPoolExecutor(number, "compile-kernels", torch.cuda.set_device, (device,))

    def submit(self, compile: Callable[[], Any]) -> Future[Any]:
        """Has a kernel compiled."""
        return self._executor.submit(_loaded, compile)

    def end(self) -> None:
        """Ends the threads when they have done all their work: it may be left, if somebody has interrupted it."""
        self._executor.shutdown(wait=False)


def _loaded(compile: Callable[[], Any]) -> Any:
    kernel = compile()
    with suppress(Exception):  # whatever it is: the first launch meets it again
        kernel.run  # noqa: B018  (a property)
    return kernel


def _num_cores() -> int:
    """Processor cores that the process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        return os.cpu_count() or 1
