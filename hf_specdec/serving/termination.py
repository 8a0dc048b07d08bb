"""Processes that signals end: SIGTERM as an exception, for what is to be done on the way out, and nothing left."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class _Terminated(SystemExit):
    """Raised by SIGTERM. Its code is that of shells for a process that the signal has ended."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def leave_no_semaphore() -> None:
    """
    Lets the progress bars of this process share a lock of its own. By default tqdm makes one for several processes,
    whose semaphore is left where a signal ends the process; Python's resource tracker then warns of it.
    """
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())


@contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """
    A context that SIGTERM leaves by an exception. After that the process ends by the signal, as without the context.
    (By default the signal ends a process at once, with no `finally` run.) In threads other than the main one, which
    get no signals, the context does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, before)
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
