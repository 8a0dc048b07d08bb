"""Files to which answers are appended as they come: whatever kills a process, its answers up to then are there."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


try:
    import fcntl
except ImportError:  # on Windows, where two processes are not kept from one file
    fcntl = None  # type: ignore[assignment]

SECONDS_TO_SYNC = 5.0
"""Seconds of answers that a machine which loses power may lose. (A killed process loses none.)"""


class Journal:
    """
    A file of one process, with a JSON object a line. What is left of a line that was being written when the process
    was killed is cut off.

    Args:
        path (`Path`): the file, made if it is not there.

    Raises:
        ValueError: if another process has it open.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            self._lock()
            end = 0
            for begin, _, line in entries(path):
                end = begin + len(line)
            os.ftruncate(self._file, end)
        except BaseException:
            os.close(self._file)
            raise
        self._synced = time.monotonic()

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{str(self.path)!r} is written by another process. Wait for its end, or name another output file."
            ) from error

    def append(self, entry: dict[str, Any]) -> None:
        """Adds an entry."""
        left = memoryview(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
        while left:
            left = left[os.write(self._file, left) :]
        if time.monotonic() - self._synced > SECONDS_TO_SYNC:
            self.sync()

    def sync(self) -> None:
        """Waits until what has been added is on the disk."""
        os.fsync(self._file)
        self._synced = time.monotonic()

    def close(self) -> None:
        """Ends the writing. Called again, it does nothing."""
        if self._file >= 0:
            self.sync()
            os.close(self._file)
            self._file = -1


def entries(path: Path, start: int = 0) -> Iterator[tuple[int, dict[str, Any], bytes]]:
    """
    The entries of a journal from a place on, up to the first that is not whole: where each begins, itself, and its
    line. None of one that has been removed.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(start)
        for line in file:
            try:
                entry = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:  # what a machine left that lost power
                return
            if not isinstance(entry, dict):
                return
            yield start, entry, line
            start += len(line)
