"""The input of a bulk job: a file of JSON lines."""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_left
from pathlib import Path


BOM = b"\xef\xbb\xbf"


class Records:
    """
    The lines of a file, each of which is a record; blank ones are none. Keeps where they begin, not what they are.

    Args:
        path (`Path`): the file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is a pipe, or no line of it is a JSON object.
    """

    def __init__(self, path: Path):
        self.path = path
        self.lines = array("Q")
        """Number of each record's line in the file, from 1."""
        self._begins = array("Q")
        if path.is_fifo():
            raise ValueError(f"{str(path)!r} is a pipe, and records are read at any place. Write it to a file first.")
        digest, at, has_object, problem = hashlib.sha256(), 0, False, "It has no lines."
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                digest.update(line)
                if line.strip():
                    self.lines.append(number)
                    self._begins.append(at)
                    if not has_object:
                        why = _why_no_object(line)
                        has_object = why is None
                        problem = why if why is not None and len(self.lines) == 1 else problem
                at += len(line)
        if not has_object:
            first = f"Line {self.lines[0]}: {problem}" if self.lines else problem
            raise ValueError(
                f"{str(path)!r} is no file of JSON lines: no line of it is a JSON object. {first} Write one object a "
                'line, such as {"prompt": "…"} or {"messages": […]}.'
            )
        self.digest = digest.hexdigest()
        """SHA-256 of the file."""

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, index: int) -> bytes:
        """The record at an index, from 0."""
        with self.path.open("rb") as file:
            file.seek(self._begins[index])
            return file.readline().removeprefix(BOM).strip()

    def index_of(self, line: int) -> int:
        """The index of the record on a line."""
        return bisect_left(self.lines, line)


def _why_no_object(line: bytes) -> str | None:
    try:
        value = json.loads(line.removeprefix(BOM).decode())
    except UnicodeDecodeError as error:
        return f"no UTF-8 at byte {error.start}."
    except (json.JSONDecodeError, RecursionError) as error:
        return f"{error}."
    return None if isinstance(value, dict) else f"a {type(value).__name__}."
