"""Whether the process compiles or captures at present, which takes long and is no forward."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


_lock = threading.Lock()
_number = 0


@contextmanager
def building() -> Iterator[None]:
    """A context in which the process compiles code or captures a CUDA graph. May be nested, and in several threads."""
    global _number
    with _lock:
        _number += 1
    try:
        yield
    finally:
        with _lock:
            _number -= 1


def is_building() -> bool:
    """Whether a thread of the process is in `building`."""
    return _number > 0
