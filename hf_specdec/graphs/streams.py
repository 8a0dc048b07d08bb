"""Streams of captured work: each thread's own, and branches that the device may run beside other work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


_of_thread = threading.local()


def own_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """
    This thread's stream on a device for a purpose. Memory that one captured graph leaves to another of the same
    `GraphPool` is that of the same stream: captures on new streams share none.
    """
    streams: dict[tuple[torch.device, str], torch.cuda.Stream] = vars(_of_thread).setdefault("streams", {})
    if (device, purpose) not in streams:
        streams[device, purpose] = torch.cuda.Stream(device)
    return streams[device, purpose]


class Branch:
    """
    Captured work that needs only the first part of what was launched before it. In a CUDA graph it runs beside the
    rest: kernels over few rows leave most of a GPU idle. (Fork and join take the device a few microseconds: three
    small kernels were slower in a branch, sixty were faster.) On a CPU it runs where it stands.

    On the device, the branch begins at `begin`, which is before it is launched, and what follows its context waits for
    it. So it must read only tensors that are held from `begin` to its end, and its own must not be used after it.

    Args:
        device (`torch.device`): device of the work.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._start: Any = None

    def begin(self) -> None:
        """Lets the branch wait for the work launched so far, and for no more. The last of several calls counts."""
        if self._device.type == "cuda":
            self._start = torch.cuda.Event()
            self._start.record(torch.cuda.current_stream(self._device))

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which the work of the branch is launched; without a `begin` it runs where it stands."""
        if self._start is None:
            yield
            return
        main, side = torch.cuda.current_stream(self._device), own_stream(self._device, "branch")
        side.wait_event(self._start)
        try:
            with torch.cuda.stream(side):
                yield
        finally:
            main.wait_stream(side)
