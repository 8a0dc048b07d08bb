"""Streams of captured work: each thread's own, and branches that the device may run beside other work."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


class _Streams:
    """The streams of a thread, by device and purpose."""

    def __init__(self) -> None:
        self.by_purpose: dict[tuple[int, str], torch.cuda.Stream] = {}


_of_this_thread, _of_all, _handing_out = threading.local(), weakref.WeakSet[_Streams](), threading.Lock()
_NUM_STREAMS = 32
"""Number of streams per device that torch hands out, in turn."""


def own_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """
    This thread's stream on a device for a purpose; this function gives it to no other living thread, as long as there
    are enough. Memory that one captured graph leaves to another of the same `GraphPool` is that of the same stream:
    captures on new streams share none.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    streams: _Streams = vars(_of_this_thread).setdefault("streams", _Streams())
    if (index, purpose) not in streams.by_purpose:
        with _handing_out:
            _of_all.add(streams)
            taken = [stream for other in _of_all for stream in other.by_purpose.values()]
            drawn = (torch.cuda.Stream(index) for _ in range(_NUM_STREAMS))
            free = (stream for stream in drawn if stream not in taken)
            streams.by_purpose[index, purpose] = next(free, None) or torch.cuda.Stream(index)
    return streams.by_purpose[index, purpose]


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
        except BaseException:
            with suppress(RuntimeError):  # the first error says more
                main.wait_stream(side)
            raise
        main.wait_stream(side)
