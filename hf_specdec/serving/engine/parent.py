"""The end of the engine's process with that of the server, whatever ends the server."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


_PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that the calling process gets when the thread that started it ends."""


def kill_with_parent() -> None:
    """
    Makes the kernel kill this process when the thread that started it ends. A thread of Python's cannot do that while
    a step holds the global interpreter lock. Does nothing where the system is not Linux.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = multiprocessing.parent_process()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent.pid:  # it ended before the call
        os._exit(1)


@contextmanager
def while_the_parent_lives() -> Iterator[None]:
    """A context in which the process ends with its parent: on Linux by the kernel, elsewhere by a thread."""
    kill_with_parent()
    has_left, parent = threading.Event(), multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        if not has_left.is_set():
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        has_left.set()
